"""All layers of a decoder as one native call a step, for a model on one rank with native operators and attention.

Bit for bit what the layers give one after the other; it saves what calling them one by one costs, some 40 µs a layer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from penstock_server.attention.interface import Attention, StepBatch
from penstock_server.attention.native import NativeAttention, batch_addresses
from penstock_server.kernels.native_ops import NativeLinear
from penstock_server.kernels.ops import PackedLinear
from penstock_server.parallel import RankGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StackLayer:
    """What one layer consists of."""

    attention_norm: Tensor  # [hidden]
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # from pack_gate_up
    down: PackedLinear


class NativeStack:
    """Layers and the norm behind them."""

    @classmethod
    def of(
        cls,
        attention: Attention,
        layers: list[StackLayer],
        final_norm: Tensor,
        rope: tuple[Tensor, Tensor],
        eps: float,
        group: RankGroup,
    ) -> NativeStack | None:
        """None where the layers must go one by one: not all is native, or ranks meet inside a layer."""
        linears = [linear for layer in layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        is_native = all(isinstance(linear, NativeLinear) for linear in linears)
        if group.size > 1 or not is_native or not isinstance(attention, NativeAttention) or attention.is_filled_up:
            logger.info("layers: one by one")
            return None
        logger.info("layers: one native call")
        return cls(attention, layers, final_norm, rope, eps)

    def __init__(
        self,
        attention: NativeAttention,
        layers: list[StackLayer],
        final_norm: Tensor,
        rope: tuple[Tensor, Tensor],
        eps: float,
    ) -> None:
        """rope: cos, sin [max positions, rotary_dim / 2] float32. Raises ValueError when sizes do not fit together."""
        import penstock_kernels

        cos, sin = rope
        self._layers, self._kept = layers, (final_norm, cos, sin)  # the native side holds their addresses
        self._native = penstock_kernels.Stack(
            attention.native,
            [
                (
                    layer.attention_norm.data_ptr(),
                    _packed(layer.qkv),
                    _packed(layer.output),
                    layer.mlp_norm.data_ptr(),
                    _packed(layer.gate_up),
                    _packed(layer.down),
                )
                for layer in layers
            ],
            final_norm.data_ptr(),
            (cos.data_ptr(), sin.data_ptr(), cos.shape[1]),
            eps,
        )

    def run(self, residual: Tensor, caches: list[Tensor], batch: StepBatch) -> Tensor:
        """Embeddings [tokens, hidden], which are used up, to the normed output at sampled rows [samples, hidden]."""
        assert residual.is_contiguous()
        num_tokens, hidden = residual.shape
        num_samples = batch.sample_rows.shape[0]
        output = residual.new_empty((num_samples, hidden))
        self._native.run(
            (residual.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(), num_tokens),
            batch_addresses(batch),
            [cache.data_ptr() for cache in caches],
            (batch.sample_rows.data_ptr(), num_samples, output.data_ptr()),
        )
        return output


def _packed(linear: PackedLinear) -> object:
    assert isinstance(linear, NativeLinear)
    return linear.packed
