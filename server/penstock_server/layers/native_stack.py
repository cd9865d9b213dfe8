"""All layers of a decoder as one native call a step, for a model on one rank with native operators and attention.

Bit for bit what the layers give one after the other; it saves what calling them one by one costs, some 40 µs a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock_server.attention.interface import StepBatch
from penstock_server.attention.native import NativeAttention, batch_addresses
from penstock_server.kernels.native_ops import NativeLinear


@dataclass(frozen=True, slots=True)
class StackLayer:
    """What one layer consists of."""

    attention_norm: Tensor  # [hidden]
    qkv: NativeLinear
    output: NativeLinear
    mlp_norm: Tensor  # [hidden]
    gate_up: NativeLinear  # from pack_gate_up
    down: NativeLinear


class NativeStack:
    """Layers and the norm behind them."""

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
                    layer.qkv.packed,
                    layer.output.packed,
                    layer.mlp_norm.data_ptr(),
                    layer.gate_up.packed,
                    layer.down.packed,
                )
                for layer in layers
            ],
            final_norm.data_ptr(),
            (cos.data_ptr(), sin.data_ptr(), cos.shape[1]),
            eps,
        )

    def run(self, residual: Tensor, caches: list[Tensor], batch: StepBatch) -> Tensor:
        """Embeddings [tokens, hidden], which are used up, to the normed output of the sampled rows [samples, hidden]."""
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
