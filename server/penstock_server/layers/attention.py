"""The attention block of one layer: fused query, key and value projection, rope, paged attention, output projection.

Sharded by heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock_server.attention.interface import Attention, AttentionShape, StepBatch
from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.layers.linear import Layout, LinearOut, read_fused
from penstock_server.weights.loader import Loader


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    qkv: PackedLinear
    output: LinearOut
    shape: AttentionShape
    ops: Ops
    attention: Attention
    cos: Tensor  # [max positions, rotary_dim / 2] float32
    sin: Tensor

    @classmethod
    def load(
        cls,
        loader: Loader,
        prefix: str,
        shape: AttentionShape,
        ops: Ops,
        attention: Attention,
        rope: tuple[Tensor, Tensor],
        layout: Layout,
    ) -> AttentionBlock:
        """Fuses and packs the projections; the originals are free when it returns."""
        qkv = ops.pack_linear(*read_fused(loader, [f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"]))
        output = LinearOut.load(loader, ops, f"{prefix}.output", layout)
        return cls(qkv, output, shape, ops, attention, *rope)

    def store(self, x: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """Writes the new tokens' keys and values into the cache; the rotated queries [tokens, heads, head_dim]."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        queries, keys, values = qkv.split([heads, kv_heads, kv_heads], dim=1)
        self.ops.rotate(queries, keys, self.cos, self.sin, batch.positions)
        self.attention.write(cache, keys, values, batch.slots)
        return queries

    def attend(self, queries: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, heads on this rank * head_dim]"""
        return self.attention.attend(queries, cache, batch).reshape(queries.shape[0], -1)

    def project(self, attended: Tensor) -> Tensor:
        """[rows, hidden], the same on all ranks."""
        return self.output(attended)
