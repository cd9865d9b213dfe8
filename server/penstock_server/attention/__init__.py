"""Chooses the attention implementation of a layer, once, at load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock_server.kernels import may_be_native

if TYPE_CHECKING:
    import torch

    from penstock_server.attention.interface import Attention, AttentionShape

logger = logging.getLogger(__name__)


def choose_attention(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attention:
    """The fastest attention that works here for this shape."""
    if may_be_native(device, dtype):
        from penstock_server.attention import native

        if native.available(shape):
            logger.info("attention: native")
            return native.NativeAttention(shape)
    from penstock_server.attention.reference import ReferenceAttention

    logger.info("attention: reference")
    return ReferenceAttention(shape, device, dtype)
