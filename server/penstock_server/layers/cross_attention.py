"""The cross-attention of a decoder's layer: queries of the answer's tokens over keys and values of the source's, which
stand in the layer's cache at the source's slots.

Sharded by heads, as the layer's own attention is.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock_server.attention.interface import Attention, AttentionShape, StepBatch
from penstock_server.kernels.ops import PackedLinear
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import LinearOut, read_fused


@dataclass(frozen=True, slots=True)
class CrossAttentionBlock:
    """Its parameters are those of an `AttentionBlock`.

    INVARIANT: its attention and that of its layer are one implementation for heads of one size, so a cache that one
    writes the other reads.
    """

    queries: PackedLinear
    kv: PackedLinear
    output: LinearOut
    shape: AttentionShape
    attention: Attention

    @classmethod
    def load(cls, spec: AttentionSpec, prefix: str, context: BuildContext) -> CrossAttentionBlock:
        loader, ops, shard = context.loader, context.ops, context.shard
        shape = spec.shape(shard, context.block_tokens)
        return cls(
            queries=ops.pack_linear(*read_fused(loader, [f"{prefix}.q"])),
            kv=ops.pack_linear(*read_fused(loader, [f"{prefix}.k", f"{prefix}.v"])),
            output=LinearOut.load(loader, ops, f"{prefix}.output", spec.output_layout(shard)),
            shape=shape,
            attention=context.attention(shape),
        )

    def store(self, states: Tensor, cache: Tensor, slots: Tensor) -> None:
        """states [source tokens, hidden]: what the encoder made of them."""
        kv = self.kv(states).view(states.shape[0], 2 * self.shape.num_kv_heads, self.shape.head_dim)
        keys, values = kv.chunk(2, dim=1)
        self.attention.write(cache, keys, values, slots)

    def attend(self, x: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """x [answer tokens, hidden] → [answer tokens, heads on this rank * head_dim]"""
        queries = self.queries(x).view(x.shape[0], self.shape.num_heads, self.shape.head_dim)
        return self.attention.attend(queries, cache, batch).reshape(x.shape[0], -1)

    def project(self, attended: Tensor) -> Tensor:
        """Any rows of what `attend` gave → [rows, hidden], the same on all ranks."""
        return self.output(attended)
