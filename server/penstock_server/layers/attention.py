"""The self-attention block of one layer: fused query, key and value projection, norms and rope, paged attention, output
projection. Sharded by heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.attention.interface import Alibi, Attention, AttentionMask, AttentionShape, HeadNorms
from penstock_server.device.ops import Elementwise, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import (
    Attend,
    Clamp,
    Gate,
    Multiply,
    NormHeads,
    Pick,
    Pieces,
    Program,
    Register,
    Rotate,
    ScaleQueries,
    Write,
)
from penstock_server.layers.qk_norm import QkNorm, QkNormSpec, as_head_norms, load_qk_norms, qk_norm_parameters
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.layers.rope import RopeSpec
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import HeadSplit, Shard
from penstock_server.layers.temperature import TemperatureSpec
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
    mask: AttentionMask = AttentionMask()  # noqa: RUF009 - frozen
    qk_norm: QkNormSpec | None = None
    clip: float | None = None  # queries, keys and values are clamped to ± this (MPT, DBRX, OLMo)
    soft_cap: float | None = None
    alibi: Alibi | None = None  # with a slope for each head of all ranks
    sinks: bool = False
    relative_bias: RelativeBiasSpec | None = None
    temperature: TemperatureSpec | None = None  # queries have one after norms and rope
    # What is attended to is multiplied by the sigmoid of a gate for each element. Each head of the projection of
    # queries has its query and then its gates (Qwen3-Next).
    has_gates: bool = False
    value_dim: int | None = None  # elements of a value's head; None: as many as of a key's (MiMo V2 has fewer)

    def heads(self, shard: Shard) -> HeadSplit:
        return shard.heads(self.num_heads, self.num_kv_heads)

    def shape(self, shard: Shard, block_tokens: int) -> AttentionShape:
        """On this rank."""
        heads = self.heads(shard)
        return AttentionShape(
            num_heads=len(heads.mine),
            num_kv_heads=len(heads.my_kv),
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            scale=self.scale,
            block_tokens=block_tokens,
            mask=self.mask,
            soft_cap=self.soft_cap,
            alibi=None if self.alibi is None else self.alibi.for_heads(heads.mine),
            has_relative_bias=self.relative_bias is not None,
            has_sinks=self.sinks,
        )

    def output_widths(self, shard: Shard) -> tuple[int, ...]:
        """The input features of the output projection on each rank."""
        return self.heads(shard).heads.widths(self.output_dim)

    @property
    def output_dim(self) -> int:
        """Elements of a value's head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widths(self) -> dict[str, int]:
        """Output features of q, k and v, for checkpoints that store them as one tensor."""
        num_kv_heads = self.num_kv_heads
        keys, values = num_kv_heads * self.head_dim, num_kv_heads * self.output_dim
        return {"q": self.num_heads * self.query_width, "k": keys, "v": values}

    @property
    def query_width(self) -> int:
        """Output features of a head of q."""
        return 2 * self.head_dim if self.has_gates else self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Implements `AttentionPart`."""

    states: ClassVar[tuple[()]] = ()
    spec: AttentionSpec
    qkv: PackedLinear
    output: RowParallelLinear
    attention: Attention
    rope: tuple[Tensor, Tensor] | None  # cos, sin [max positions, rotary_dim / 2] float32
    norms: tuple[QkNorm, QkNorm] | None  # norms of queries and of keys
    fused_norms: HeadNorms | None  # the same, if the attention can compute them
    clip: float | None  # `AttentionSpec.clip`, rounded to the dtype of what it bounds
    sinks: Tensor | None  # [heads on this rank]
    bias: Tensor | None  # [heads on this rank, distances]
    scales: KvScales | None
    gate: Elementwise | None  # what gates are put through; None: there are none
    factors: Tensor | None  # factors of queries by their positions; see `TemperatureSpec.factors`
    site: int | None  # adapter site of `qkv`

    @staticmethod
    def parameters(spec: AttentionSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        shard, dim = layout.shard, spec.head_dim
        heads = spec.heads(shard)
        table: dict[str, Parameter] = {}
        for name, width in spec.widths.items():
            mine = heads.mine if name == "q" else heads.my_kv
            head = {"q": spec.query_width, "k": dim, "v": spec.output_dim}[name]
            part = Part(0, range(mine.start * head, mine.stop * head))
            shape, layer = (width, shard.hidden_size), f"{prefix}.qkv"
            table |= layout.linear(f"{prefix}.{name}", shape, bias=spec.qkv_bias, part=part, layer=layer)
        columns = range(heads.mine.start * spec.output_dim, heads.mine.stop * spec.output_dim)
        into_hidden = spec.num_heads * spec.output_dim
        table |= layout.into_hidden(f"{prefix}.output", into_hidden, columns, bias=spec.output_bias)
        if spec.qk_norm is not None:
            table |= qk_norm_parameters(spec.qk_norm, prefix, dim, heads)
        if spec.sinks:
            table[f"{prefix}.sinks"] = Parameter((spec.num_heads,), Part(0, heads.mine))
        if spec.relative_bias is not None:
            table |= spec.relative_bias.parameters(spec.num_heads, heads.mine)
        return table

    @staticmethod
    def kv_elements_per_token(spec: AttentionSpec, shard: Shard) -> int:
        """Cache elements of one token on this rank."""
        return len(spec.heads(shard).my_kv) * (spec.head_dim + spec.output_dim)

    @staticmethod
    def state_layouts(spec: AttentionSpec, shard: Shard) -> tuple[()]:
        """It keeps keys and values, no state."""
        return ()

    @classmethod
    def load(cls, spec: AttentionSpec, prefix: str, context: BuildContext) -> AttentionBlock:
        loader, shard = context.loader, context.shard
        attention = context.attention.for_shape(spec.shape(shard, context.block_tokens))
        norms = fused_norms = None
        if spec.qk_norm is not None:
            norms = load_qk_norms(spec.qk_norm, prefix, spec.head_dim, spec.heads(shard), context)
            if attention.transforms:
                fused_norms = as_head_norms(norms, spec.qk_norm, spec.head_dim, shard)
        output = RowParallelLinear.load(f"{prefix}.output", spec.output_widths(shard), context)
        names = f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"
        return cls(
            spec=spec,
            qkv=context.linear(*names),
            output=output,
            attention=attention,
            rope=None if spec.rope is None else context.rope(spec.rope),
            norms=norms,
            fused_norms=fused_norms,
            clip=None if spec.clip is None else float(torch.tensor(spec.clip, dtype=output.dtype)),
            sinks=loader.read(f"{prefix}.sinks") if spec.sinks else None,
            bias=None if spec.relative_bias is None else context.relative_bias(spec.relative_bias),
            scales=context.kv_scales(f"{prefix}.k", f"{prefix}.v"),
            gate=context.ops.elementwise(torch.sigmoid) if spec.has_gates else None,
            factors=None if spec.temperature is None else context.query_factors(spec.temperature),
            site=context.site(*names),
        )

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        attention, spec = self.attention, self.spec
        program.append(Multiply(source, "qkv" if self.gate is None else "gated_qkv", self.qkv, self.site))
        if self.gate is not None:
            num_heads, num_kv_heads, dim = attention.shape.num_heads, attention.shape.num_kv_heads, spec.head_dim
            keys_and_values = Pieces(num_heads * 2 * dim, dim, 2 * num_kv_heads, dim)
            program.append(Pick("gated_qkv", "qkv", [Pieces(0, 2 * dim, num_heads, dim), keys_and_values]))
            program.append(Pick("gated_qkv", "gates", [Pieces(dim, 2 * dim, num_heads, dim)]))
        if self.clip is not None:
            program.append(Clamp("qkv", "qkv", self.clip))
        if self.norms is not None and not self.norms_follow_rope:
            program.append(self._norm_heads(self.norms))
        if self.rope is not None and spec.rope is not None:
            program.append(Rotate("qkv", "qkv", attention, *self.rope, spec.rope.interleaved))
        if self.norms is not None and self.norms_follow_rope:
            program.append(self._norm_heads(self.norms))
        if spec.temperature is not None and self.factors is not None:
            program.append(ScaleQueries("qkv", "qkv", attention, self.factors, spec.temperature.row_positions))
        program.append(Write("qkv", "qkv", attention, self.scales))
        program.append(Attend("qkv", "attended", attention, self.sinks, self.bias, self.scales))
        if self.gate is not None:
            program.append(Gate("gates", "attended", self.gate))
        return "attended"

    def _norm_heads(self, norms: tuple[QkNorm, QkNorm]) -> NormHeads:
        shape = self.attention.shape
        return NormHeads("qkv", "qkv", norms, (shape.num_heads, shape.num_kv_heads), shape.head_dim, self.fused_norms)

    @property
    def norms_follow_rope(self) -> bool:
        return self.spec.qk_norm is not None and self.spec.qk_norm.is_after_rope
