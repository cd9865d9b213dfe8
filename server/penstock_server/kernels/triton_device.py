"""Where Triton kernels run, and how they are launched. This module does not import Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)


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


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply 8-bit floats."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 9)


def launch(function: Any, grid: tuple[int, int], **arguments: Any) -> None:
    """Enqueues a kernel on the current stream. An empty grid is none."""
    if all(grid):
        runner: Callable[..., object] = function[grid]
        runner(**arguments)
