"""The cross-attention of a decoder layer: queries of the answer's tokens over keys and values of the source's, which
are in the layer's own cache at the source's slots; or over those of images, in a cache of their own. Sharded by
heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock_server.device.attention.interface import Attention, AttentionShape
from penstock_server.device.ops import PackedLinear
from penstock_server.layers.attention import AttentionBlock, AttentionSpec
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import Attend, Multiply, NormHeads, Program, Register
from penstock_server.layers.qk_norm import QkNorm, load_qk_norms
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class CrossAttentionBlock:
    """Has the parameters of an `AttentionBlock`.

    INVARIANT: it and the layer's self-attention, if it has one, have heads of the same size, hence the same
    implementation, so either reads a cache that the other has written.
    """

    queries: PackedLinear
    kv: PackedLinear
    output: RowParallelLinear
    shape: AttentionShape
    attention: Attention
    norms: tuple[QkNorm, QkNorm] | None  # norms of queries and of keys

    @staticmethod
    def parameters(spec: AttentionSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        table, queries = AttentionBlock.parameters(spec, prefix, layout), f"{prefix}.q.weight"
        return table | {queries: replace(table[queries], layer="")}

    @classmethod
    def load(cls, spec: AttentionSpec, prefix: str, context: BuildContext) -> CrossAttentionBlock:
        shape, norms = spec.shape(context.shard, context.block_tokens), None
        if spec.qk_norm is not None:
            norms = load_qk_norms(spec.qk_norm, prefix, spec.head_dim, spec.heads(context.shard), context)
        return cls(
            queries=context.linear(f"{prefix}.q"),
            kv=context.linear(f"{prefix}.k", f"{prefix}.v"),
            output=RowParallelLinear.load(f"{prefix}.output", spec.output_widths(context.shard), context),
            shape=shape,
            attention=context.attention.for_shape(shape),
            norms=norms,
        )

    def store(self, states: Tensor, cache: Tensor, slots: Tensor) -> None:
        """states [source tokens, hidden]: the encoder's output for the tokens at these slots [source tokens] int64."""
        self.write(self.project_kv(states), cache, slots)

    @property
    def num_kv_values(self) -> int:
        """In the keys and values of one source token."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim

    def project_kv(self, states: Tensor) -> Tensor:
        """[source tokens, hidden] → keys and values [source tokens, 2 * kv heads on this rank, head_dim]."""
        kv = self.kv(states).view(states.shape[0], 2 * self.shape.num_kv_heads, self.shape.head_dim)
        if self.norms is None:
            return kv
        keys, values = kv.chunk(2, dim=1)
        return torch.cat((self.norms[1](keys), values), dim=1)

    def write(self, kv: Tensor, cache: Tensor, slots: Tensor) -> None:
        """kv: as `project_kv` returns it, of the tokens at these slots [source tokens] int64."""
        keys, values = kv.chunk(2, dim=1)
        self.attention.write_kv(cache, keys, values, slots)

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends the attention of the rows in the source. Returns where the result is."""
        program.append(Multiply(source, "qkv", self.queries))
        if self.norms is not None:
            program.append(NormHeads("qkv", "qkv", self.norms[:1], (self.shape.num_heads,), self.shape.head_dim))
        program.append(Attend("qkv", "attended", self.attention))
        return "attended"
