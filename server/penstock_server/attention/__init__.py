"""Selects the attention implementation of each layer at load, and prepares each step for all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock_server.kernels import may_be_native

if TYPE_CHECKING:
    import torch

    from penstock_server.attention.interface import Attention, AttentionShape, StepBatch

logger = logging.getLogger(__name__)


def choose_attention(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Attention:
    """The fastest implementation that supports this shape on this device. kv_dtype: an fp8 dtype of stored keys and
    values; None: dtype."""
    if may_be_native(device, dtype) and kv_dtype is None:
        from penstock_server.attention import native

        if native.supports(shape):
            logger.info("attention: native")
            return native.NativeAttention(shape)
    from penstock_server.attention.reference import ReferenceAttention

    if device.type == "cuda":
        from penstock_server.attention import triton
        from penstock_server.kernels import triton_device

        reason = triton_device.unavailable_reason(device) or triton.unsupported_reason(shape)
        if reason is None:
            from penstock_server.attention.triton.backend import TritonAttention

            logger.info("attention: triton")
            return TritonAttention(shape, device, dtype, kv_dtype=kv_dtype)
        logger.warning("attention: reference, which is slow, because Triton kernels cannot be used: %s", reason)
    elif kv_dtype is not None:
        logger.warning("attention: reference, which is slow, because no other stores fp8 on a CPU (--kv-cache-dtype)")
    else:
        logger.info("attention: reference")
    return ReferenceAttention(shape, device, dtype, kv_dtype)


class ModelAttention:
    """The attention of one model's layers: an implementation for each shape, and the metadata that they share."""

    def __init__(self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        """kv_dtype: as of `choose_attention`."""
        self.kv_dtype = kv_dtype
        self._device = device
        self._dtype = dtype
        self._by_shape: dict[AttentionShape, Attention] = {}

    def for_shape(self, shape: AttentionShape) -> Attention:
        """Layers of one shape share it."""
        if shape not in self._by_shape:
            self._by_shape[shape] = choose_attention(shape, self._device, self._dtype, self.kv_dtype)
        return self._by_shape[shape]

    @property
    def name(self) -> str:
        """The names of the implementations in use, for people."""
        return " and ".join(sorted(self._by_name))

    def prepare(self, batch: StepBatch) -> Mapping[str, Any]:
        """A step's metadata, by the name of the implementation that reads it."""
        return {name: attention.prepare(batch) for name, attention in self._by_name.items()}

    @property
    def _by_name(self) -> dict[str, Attention]:
        return {attention.name: attention for attention in self._by_shape.values()}


def preferred_block_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens per KV block for the attention that most layers will get here."""
    if may_be_native(device, dtype):
        from penstock_server.attention.native import NativeAttention

        return NativeAttention.preferred_block_tokens
    if device.type == "cuda":
        from penstock_server.attention import triton
        from penstock_server.kernels import triton_device

        if triton_device.unavailable_reason(device) is None:
            return triton.PREFERRED_BLOCK_TOKENS
    from penstock_server.attention.reference import ReferenceAttention

    return ReferenceAttention.preferred_block_tokens
