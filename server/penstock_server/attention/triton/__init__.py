"""Paged attention in Triton kernels, for CUDA devices. This module imports neither Triton nor the kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock_server.attention.interface import AttentionShape

PREFERRED_BLOCK_TOKENS = 64  # a key tile of the most common head sizes lies in one block
MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 576  # of keys that contain their values (multi-head latent attention)
MAX_LATENT_VALUE_DIM = 512


def unsupported_reason(shape: AttentionShape) -> str | None:
    """Why the kernels do not implement this shape, for people. None: they do."""
    if shape.values_in_keys:
        max_dim, max_value_dim = MAX_LATENT_DIM, MAX_LATENT_VALUE_DIM
    else:
        max_dim = max_value_dim = MAX_HEAD_DIM
    if shape.head_dim > max_dim:
        return f"heads have {shape.head_dim} elements, at most {max_dim} are supported"
    if shape.output_dim > max_value_dim:
        return f"value heads have {shape.output_dim} elements, at most {max_value_dim} are supported"
    return None


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, for people. None: they can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    # Triton compiles a launcher for each kernel.
    if os.environ.get("CC") is None and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "Triton needs a C compiler, and there is no cc, gcc or clang; install one or set CC"
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"the device's compute capability is {capability[0]}.{capability[1]}, at least 8.0 is needed"
    return None
