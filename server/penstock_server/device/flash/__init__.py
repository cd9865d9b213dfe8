"""FlashAttention-2 for plain shapes on CUDA devices, from the optional package `flash_attn`. Importing this module
imports neither the package nor the Triton kernels, which store the keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_server.device.triton import attention as triton

if TYPE_CHECKING:
    import torch

    from penstock_server.device.attention.interface import Attention, AttentionShape

PREFERRED_BLOCK_TOKENS = 256  # blocks must be multiples of it
MAX_HEAD_DIM = 256
BATCH_DEPENDENCE = "it cuts a context into a number of splits that depends on the batch"
HEAD_DIM_MULTIPLE = 8  # the package would copy the whole cache to pad other heads


def unavailable_reason(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> str | None:
    """Why it cannot run on this device in these data types, for people. None: it can."""
    if reason := triton.unavailable_reason(device, dtype, kv_dtype):
        return reason
    if kv_dtype is not None:
        return "it does not store fp8 (--kv-cache-dtype)"
    if dtype.itemsize != 2:
        return f"the data type is {str(dtype).removeprefix('torch.')}, it computes in float16 and bfloat16 only"
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except (ImportError, OSError) as error:  # it is not installed, or was compiled for another version of torch
        return f"the package flash_attn cannot be imported ({error}); install it as docs/install.md says"
    return None


def unsupported_reason(shape: AttentionShape) -> str | None:
    """Why it does not implement this shape, for people. None: it does."""
    if shape.block_tokens % PREFERRED_BLOCK_TOKENS:
        return f"KV blocks have {shape.block_tokens} tokens, a multiple of {PREFERRED_BLOCK_TOKENS} is needed"
    if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % HEAD_DIM_MULTIPLE:
        return f"heads have {shape.head_dim} elements, a multiple of 8 and at most {MAX_HEAD_DIM} are supported"
    if shape.values_in_keys or shape.output_dim != shape.head_dim:
        return "keys and values differ in size, or share memory"
    has_alibi_in_bfloat16 = shape.alibi is not None and shape.alibi.is_bfloat16
    features = {
        "chunks of positions": shape.mask.chunk is not None,
        "an encoder": shape.mask.part != "context",
        "images that are seen as a whole": shape.mask.sees_spans,
        "sinks": shape.has_sinks,
        "a bias by distance": shape.has_relative_bias,
        "ALiBi rounded to bfloat16": has_alibi_in_bfloat16,
    }
    return next((f"{feature} is not supported" for feature, is_needed in features.items() if is_needed), None)


def make(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None, cpu_isa: str
) -> Attention:
    from penstock_server.device.flash.backend import FlashAttention

    return FlashAttention(shape, device, dtype)
