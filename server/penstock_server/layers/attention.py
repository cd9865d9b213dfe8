"""The self-attention block of one layer: fused query, key and value projection, norms and rope, paged attention, output
projection. Sharded by heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.attention.fp8 import KvScales
from penstock_server.attention.interface import (
    Alibi,
    Attention,
    AttentionMask,
    AttentionShape,
    HeadNorms,
    Rotation,
    Transform,
)
from penstock_server.errors import ConfigError
from penstock_server.kernels.ops import Ops
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.linear import Linear
from penstock_server.layers.native_stack import NativeProgram, NotNativeError, Register, padded_head_dim
from penstock_server.layers.qk_norm import (
    ProjectionNorm,
    QkNorm,
    QkNormSpec,
    as_head_norms,
    load_qk_norms,
    qk_norm_parameters,
)
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.layers.rope import RopeSpec
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import HeadSplit, Shard
from penstock_server.layers.step import StepContext
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries grow with their position, so that attention over long contexts stays as sharp
    (https://arxiv.org/abs/2501.19399)."""

    period: int  # positions between two steps of the factor, which is 1 in the first period
    strength: float

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"config.json: floor_scale must be at least 1, not {self.period}")

    def factors(self, max_positions: int, device: torch.device) -> Tensor:
        """[periods] float32; of a position, the one at (position + 1) // period."""
        periods = torch.arange((max_positions + 1) // self.period + 1, dtype=torch.float32, device=device)
        return torch.log1p(periods) * self.strength + 1.0


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
    temperature: TemperatureSpec | None = None  # of layers without rope and norms of queries (Llama 4)

    def heads(self, shard: Shard) -> HeadSplit:
        return shard.heads(self.num_heads, self.num_kv_heads)

    def shape(self, shard: Shard, block_tokens: int) -> AttentionShape:
        """On this rank."""
        heads = self.heads(shard)
        return AttentionShape(
            num_heads=len(heads.mine),
            num_kv_heads=len(heads.my_kv),
            head_dim=self.head_dim,
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
        return self.heads(shard).heads.widths(self.head_dim)

    @property
    def widths(self) -> dict[str, int]:
        """Output features of q, k and v, for checkpoints that store them as one tensor."""
        kv_width = self.num_kv_heads * self.head_dim
        return {"q": self.num_heads * self.head_dim, "k": kv_width, "v": kv_width}


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """`store`, then `attend`, then `project`: the last may be called for some of the rows only."""

    spec: AttentionSpec
    qkv: Linear
    output: RowParallelLinear
    shape: AttentionShape
    ops: Ops
    attention: Attention
    rope: tuple[Tensor, Tensor] | None  # cos, sin [max positions, rotary_dim / 2] float32
    norms: tuple[QkNorm, QkNorm] | None  # of queries, of keys
    fused_norms: HeadNorms | None  # the same, if the attention can compute them
    clip: float | None  # `AttentionSpec.clip`, rounded to the dtype of what it bounds
    sinks: Tensor | None  # [heads on this rank]
    bias: Tensor | None  # [heads on this rank, distances]
    scales: KvScales | None
    factors: Tensor | None  # of queries by their positions; see `TemperatureSpec.factors`
    site: int | None  # of `qkv`

    @staticmethod
    def parameters(spec: AttentionSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        shard, dim = layout.shard, spec.head_dim
        heads = spec.heads(shard)
        table: dict[str, Parameter] = {}
        for name, width in spec.widths.items():
            mine = heads.mine if name == "q" else heads.my_kv
            part = Part(0, range(mine.start * dim, mine.stop * dim))
            shape, layer = (width, shard.hidden_size), f"{prefix}.qkv"
            table |= layout.linear(f"{prefix}.{name}", shape, bias=spec.qkv_bias, part=part, layer=layer)
        columns = range(heads.mine.start * dim, heads.mine.stop * dim)
        table |= layout.into_hidden(f"{prefix}.output", spec.num_heads * dim, columns, bias=spec.output_bias)
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
        return 2 * len(spec.heads(shard).my_kv) * spec.head_dim

    @classmethod
    def load(cls, spec: AttentionSpec, prefix: str, context: BuildContext) -> AttentionBlock:
        loader, shard = context.loader, context.shard
        shape = spec.shape(shard, context.block_tokens)
        attention = context.attention.for_shape(shape)
        norms = fused_norms = None
        if spec.qk_norm is not None:
            norms = load_qk_norms(spec.qk_norm, prefix, spec.head_dim, spec.heads(shard), context)
            if attention.transforms:
                fused_norms = as_head_norms(norms, spec.qk_norm, spec.head_dim, shard)
        output = RowParallelLinear.load(f"{prefix}.output", spec.output_widths(shard), context)
        names = f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"
        qkv, site = context.linear(*names), context.site(*names)
        return cls(
            spec=spec,
            qkv=context.adapted(qkv, site),
            output=output,
            shape=shape,
            ops=context.ops,
            attention=attention,
            rope=None if spec.rope is None else context.rope(spec.rope),
            norms=norms,
            fused_norms=fused_norms,
            clip=None if spec.clip is None else float(torch.tensor(spec.clip, dtype=output.dtype)),
            sinks=loader.read(f"{prefix}.sinks") if spec.sinks else None,
            bias=None if spec.relative_bias is None else context.relative_bias(spec.relative_bias),
            scales=context.kv_scales(f"{prefix}.k", f"{prefix}.v"),
            factors=None
            if spec.temperature is None
            else spec.temperature.factors(context.max_position_tokens, loader.device),
            site=site,
        )

    def store(self, x: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """x [tokens, hidden]: writes its keys and values to the cache, and returns the rotated queries [tokens, heads,
        head_dim]."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x, step)
        clip, norms, rotation = self.clip, self.fused_norms, self._rotation(step)
        is_apart = not self.attention.transforms or (self.norms is not None and norms is None)
        if is_apart and clip is not None:
            qkv.clamp_(-clip, clip)
            clip = None
        queries, keys, values = qkv.view(x.shape[0], heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
        if is_apart:
            queries, keys, rotation = self._transform_apart(queries, keys, rotation)
        if self.spec.temperature is not None and self.factors is not None:
            factors = self.factors[(step.batch.positions + 1) // self.spec.temperature.period]
            queries = (queries * factors[:, None, None]).to(queries.dtype)
        transform = None if clip is norms is rotation is None else Transform(queries, clip, norms, rotation)
        self.attention.write_kv(cache, keys, values, step.batch.slots, transform, self.scales)
        return queries

    def attend(self, queries: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """[tokens, heads, head_dim] → [tokens, heads on this rank * head_dim]"""
        metadata = step.metadata[self.attention.name]
        attended = self.attention.attend(queries, cache, metadata, self.sinks, self.bias, self.scales)
        return attended.reshape(queries.shape[0], -1)

    def project(self, attended: Tensor, step: StepContext) -> Tensor:
        """[rows, heads on this rank * head_dim] → [rows, hidden], the same on all ranks."""
        return self.output(attended, step)

    def append_to(self, program: NativeProgram, source: Register) -> Register:
        """Appends `store` and `attend` of the input in `source` to a native stack. Returns where the result is."""
        if self.bias is not None:
            raise NotNativeError("attention with a learned bias")
        heads, dim, padded_dim = self.shape.num_heads, self.shape.head_dim, padded_head_dim(self.attention)
        product: Register = "qkv" if padded_dim == dim else "unpadded"
        program.linear(self.qkv, source, product)
        program.adapt(self.site, source, product)
        if self.clip is not None:
            program.clamp(product, self.clip)
        if not self._norms_follow_rope:
            self._append_norms(program, product)
        if padded_dim != dim:
            if self._norms_follow_rope:
                raise NotNativeError(f"norms of rotated heads of {dim} elements, which are padded")
            program.pad(product, "qkv", heads + 2 * self.shape.num_kv_heads, (dim, padded_dim))
        if self.rope is not None and self.spec.rope is not None:
            program.rotate(self.attention, self.rope, interleaved=self.spec.rope.interleaved)
        if self._norms_follow_rope:
            self._append_norms(program, "qkv")
        if self.spec.temperature is not None and self.factors is not None:
            program.scale_queries(self.attention, self.factors, self.spec.temperature.period)
        program.write(self.attention, self.scales)
        program.attend(self.sinks)
        if padded_dim == dim:
            return "attended"
        program.reserve("unpadded", heads * dim)
        program.copy("attended", (0, padded_dim), "unpadded", (0, dim), dim, heads)
        return "unpadded"

    def _append_norms(self, program: NativeProgram, register: Register) -> None:
        first = 0
        for norm, num_heads in zip(self.norms or (), (self.shape.num_heads, self.shape.num_kv_heads), strict=False):
            if isinstance(norm, ProjectionNorm):
                norm.append_to(program, register, first)
            else:
                program.norm_heads(norm, register, first, num_heads)
            first += num_heads * self.shape.head_dim

    @property
    def _norms_follow_rope(self) -> bool:
        return self.spec.qk_norm is not None and self.spec.qk_norm.is_after_rope

    def _rotation(self, step: StepContext) -> Rotation | None:
        if self.rope is None or self.spec.rope is None:
            return None
        return Rotation(*self.rope, step.batch.positions, self.spec.rope.interleaved)

    def _transform_apart(
        self, queries: Tensor, keys: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Rotation | None]:
        """Queries and keys, normed and rotated by operators of their own; the rotation if it is left to the
        attention."""
        norms = self.norms
        if norms is not None and not self._norms_follow_rope:
            queries, keys = norms[0](queries), norms[1](keys)
        if rotation is not None and (self._norms_follow_rope or not self.attention.transforms):
            tables = rotation.cos, rotation.sin, rotation.positions
            self.ops.rotate(queries, keys, *tables, interleaved=rotation.is_interleaved)
            rotation = None
        if norms is not None and self._norms_follow_rope:
            queries, keys = norms[0](queries), norms[1](keys)
        return queries, keys, rotation
