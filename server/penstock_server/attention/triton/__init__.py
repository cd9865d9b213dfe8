"""Paged attention in Triton kernels, for CUDA devices. This module imports neither Triton nor the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_server.attention.interface import AttentionShape

PREFERRED_BLOCK_TOKENS = 64  # a key tile of the most common head sizes lies in one block
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
