"""The attention block of one layer: fused query, key and value projection, norms and rope, paged attention, output
projection.

Sharded by heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock_server.attention.interface import Alibi, Attention, AttentionShape, Sight, StepBatch
from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import Layout, LinearOut, out_parameters, read_fused, rows_parameters
from penstock_server.layers.norm import Norm
from penstock_server.layers.qk_norm import QkNormSpec, WholeNorm, load_qk_norms, qk_norm_parameters
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.layers.rope import RopeSpec, rotate_interleaved
from penstock_server.layers.shard import Shard
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sight: Sight = Sight()  # noqa: RUF009 - frozen
    qk_norm: QkNormSpec | None = None
    clip: float | None = None  # results of the projections are clamped to ± this (MPT, DBRX, OLMo)
    soft_cap: float | None = None
    alibi: Alibi | None = None  # with a slope for every head of all ranks
    sinks: bool = False
    relative_bias: RelativeBiasSpec | None = None

    def shape(self, shard: Shard, block_tokens: int) -> AttentionShape:
        share = shard.heads(self.num_heads, self.num_kv_heads)
        return AttentionShape(
            num_heads=len(share.mine),
            num_kv_heads=len(share.my_kv),
            head_dim=self.head_dim,
            scale=self.scale,
            block_tokens=block_tokens,
            sight=self.sight,
            soft_cap=self.soft_cap,
            alibi=None if self.alibi is None else self.alibi.of(share.mine),
            has_bias=self.relative_bias is not None,
        )

    def output_layout(self, shard: Shard) -> Layout:
        """Of the projection from the heads to the hidden dimension."""
        return Layout.into_hidden(shard, shard.heads(self.num_heads, self.num_kv_heads).heads.widths(self.head_dim))

    @property
    def widths(self) -> dict[str, int]:
        """The rows of q, k and v, for checkpoints that keep them in one tensor."""
        kv_width = self.num_kv_heads * self.head_dim
        return {"q": self.num_heads * self.head_dim, "k": kv_width, "v": kv_width}

    @property
    def fits_stack(self) -> bool:
        """Whether it is what the layers of `NativeStack` have, where their attention is native."""
        has_plain_rope = self.rope is not None and not self.rope.interleaved
        return has_plain_rope and self.qk_norm is None and self.clip is None and not self.sinks


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    spec: AttentionSpec
    qkv: PackedLinear
    output: LinearOut
    shape: AttentionShape
    ops: Ops
    attention: Attention
    rope: tuple[Tensor, Tensor] | None  # cos, sin [max positions, rotary_dim / 2] float32
    norms: tuple[Norm | WholeNorm, Norm | WholeNorm] | None  # of queries and keys
    sinks: Tensor | None  # [heads on this rank]
    bias: Tensor | None  # [heads on this rank, distances]

    @staticmethod
    def parameters(spec: AttentionSpec, prefix: str, hidden_size: int, shard: Shard) -> dict[str, Parameter]:
        share, dim = shard.heads(spec.num_heads, spec.num_kv_heads), spec.head_dim
        heads = share.mine
        table: dict[str, Parameter] = {}
        for name, width in spec.widths.items():
            part = heads if name == "q" else share.my_kv
            rows = range(part.start * dim, part.stop * dim)
            table |= rows_parameters(f"{prefix}.{name}", (width, hidden_size), rows, spec.qkv_bias)
        columns = range(heads.start * dim, heads.stop * dim)
        shape = (hidden_size, spec.num_heads * dim)
        table |= out_parameters(f"{prefix}.output", shape, columns, shard, spec.output_bias)
        if spec.qk_norm is not None:
            table |= qk_norm_parameters(spec.qk_norm, prefix, dim, share)
        if spec.sinks:
            table[f"{prefix}.sinks"] = Parameter((spec.num_heads,), Part(0, heads))
        if spec.relative_bias is not None:
            table |= spec.relative_bias.parameters(spec.num_heads, heads)
        return table

    @staticmethod
    def cached_numbers(spec: AttentionSpec, shard: Shard) -> int:
        """How many numbers of a token this rank's cache keeps."""
        return 2 * len(shard.heads(spec.num_heads, spec.num_kv_heads).my_kv) * spec.head_dim

    @classmethod
    def load(cls, spec: AttentionSpec, prefix: str, context: BuildContext) -> AttentionBlock:
        """Fuses and packs the projections; the originals are free when it returns."""
        loader, ops, shard = context.loader, context.ops, context.shard
        shape = spec.shape(shard, context.block_tokens)
        norms = None
        if spec.qk_norm is not None:
            share = shard.heads(spec.num_heads, spec.num_kv_heads)
            norms = load_qk_norms(spec.qk_norm, prefix, spec.head_dim, share, context)
        return cls(
            spec=spec,
            qkv=ops.pack_linear(*read_fused(loader, [f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"])),
            output=LinearOut.load(loader, ops, f"{prefix}.output", spec.output_layout(shard)),
            shape=shape,
            ops=ops,
            attention=context.attention(shape),
            rope=None if spec.rope is None else context.rope(spec.rope),
            norms=norms,
            sinks=loader.read(f"{prefix}.sinks") if spec.sinks else None,
            bias=None if spec.relative_bias is None else context.relative_bias(spec.relative_bias),
        )

    def store(self, x: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """Writes the new tokens' keys and values into the cache; the rotated queries [tokens, heads, head_dim]."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x)
        if self.spec.clip is not None:
            qkv.clamp_(-self.spec.clip, self.spec.clip)
        queries, keys, values = qkv.view(x.shape[0], heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
        is_after_rope = self.spec.qk_norm is not None and self.spec.qk_norm.is_after_rope
        if self.norms is not None and not is_after_rope:
            queries, keys = self.norms[0](queries), self.norms[1](keys)
        if self.rope is not None:
            self._rotate(queries, keys, self.rope, batch.positions)
        if self.norms is not None and is_after_rope:
            queries, keys = self.norms[0](queries), self.norms[1](keys)
        self.attention.write(cache, keys, values, batch.slots)
        return queries

    def attend(self, queries: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, heads on this rank * head_dim]"""
        return self.attention.attend(queries, cache, batch, self.sinks, self.bias).reshape(queries.shape[0], -1)

    def project(self, attended: Tensor) -> Tensor:
        """[rows, hidden], the same on all ranks."""
        return self.output(attended)

    def _rotate(self, queries: Tensor, keys: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor) -> None:
        assert self.spec.rope is not None
        if self.spec.rope.interleaved:
            rotate_interleaved(queries, *rope, positions)
            rotate_interleaved(keys, *rope, positions)
        else:
            self.ops.rotate(queries, keys, *rope, positions)
