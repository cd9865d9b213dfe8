"""Paged attention in Triton kernels, for CUDA devices. This module imports neither Triton nor the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from penstock_server.device.attention.interface import Attention, AttentionShape

PREFERRED_BLOCK_TOKENS = 64  # a key tile of the most common head sizes lies in one block
BATCH_DEPENDENCE = ""
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 576  # largest dimension of keys that contain their values (multi-head latent attention)
MAX_LATENT_VALUE_DIM = 512


def unavailable_reason(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> str | None:
    """Why the kernels cannot run on this device, for people. None: they can, in any data types."""
    from penstock_server.device.triton import device as triton_device

    return triton_device.unavailable_reason(device)


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


def make(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None, cpu_isa: str
) -> Attention:
    from penstock_server.device.triton.attention.backend import TritonAttention

    return TritonAttention(shape, device, dtype, kv_dtype=kv_dtype)
