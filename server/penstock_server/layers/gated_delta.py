"""A gated delta network in place of attention (Qwen3-Next, Qwen3.5, Kimi Linear): fused projections, a convolution, the
delta rule over the sequence's state, gated norm, output projection. Sharded by heads, as attention is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from penstock_server.device.gated_delta import GatedDelta, state_layout
from penstock_server.device.ops import PackedLinear, PackedRecurrence
from penstock_server.device.state import CHUNK_TOKENS, StateLayout
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import AdvanceStates, Multiply, Program, Register
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import HeadSplit, Shard
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter

_DIM_MULTIPLE = 16  # head dimensions are multiples of it: the lanes of a vector of the native kernels
_MAX_DIM = 256  # the limit of every build of the native kernels


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Each key head serves `num_heads / num_key_heads` heads, which follow each other unless the heads are tiled."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # rows that the convolution mixes
    norm_eps: float
    is_tiled: bool = False  # heads go round the key heads, as llama.cpp orders them
    strength: float = 1.0  # the largest correction: 2 reflects what is stored of a key (OLMo Hybrid)
    decays_elements: bool = False  # each element of a head's keys decays by itself (Kimi Linear)
    decay_floor: float | None = None  # see `GatedDelta`
    has_sigmoid_gates: bool = False
    rank: int | None = None  # the projections to decays and to output gates have it; None: they are not of low rank
    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.num_key_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_key_heads:
            raise ConfigError(
                f"config.json: {self.num_heads} value heads of linear attention are not a multiple of "
                f"{self.num_key_heads} key heads"
            )
        for name, dim in (("key", self.key_dim), ("value", self.value_dim)):
            if dim % _DIM_MULTIPLE or not 0 < dim <= _MAX_DIM:
                raise ConfigError(
                    f"config.json: linear_{name}_head_dim must be a multiple of {_DIM_MULTIPLE} up to {_MAX_DIM}, "
                    f"not {dim}"
                )
        if not 0 < self.conv_width <= CHUNK_TOKENS:
            raise ConfigError(
                f"config.json: linear_conv_kernel_dim must be from 1 to {CHUNK_TOKENS}, not {self.conv_width}"
            )

    def heads(self, shard: Shard) -> HeadSplit:
        """The heads of each rank, and key heads as its `kv_heads`. Of tiled heads, each rank needs all key heads."""
        if not self.is_tiled:
            return shard.heads(self.num_heads, self.num_key_heads)
        split = shard.heads(self.num_heads, self.num_heads)
        return replace(split, kv_heads=(range(self.num_key_heads),) * len(split.kv_heads))

    def key_heads(self, shard: Shard) -> list[int]:
        """For each head of the rank, its key head, counted from the rank's first one."""
        split, group = self.heads(shard), self.num_heads // self.num_key_heads
        if self.is_tiled:
            return [head % self.num_key_heads for head in split.mine]
        return [head // group - split.my_kv.start for head in split.mine]

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_heads

    @property
    def decay_dim(self) -> int:
        """Decays of a head."""
        return self.key_dim if self.decays_elements else 1

    @property
    def widths(self) -> dict[str, int]:
        """Output features of the projections: queries, keys, values, output gates, strengths and decays."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        low = {} if self.rank is None else {"z.down": self.rank, "a.down": self.rank}
        decays = self.num_heads * self.decay_dim
        return {"q": keys, "k": keys, "v": values, "z": values, "b": self.num_heads, "a": decays, **low}

    @property
    def layers(self) -> dict[Register, tuple[tuple[str, ...], ...]]:
        """For each input of the net, linear layers in sequence, and the projections of each."""
        if self.rank is None:
            return {"mixed": (("q", "k", "v", "z"),), "rates": (("b", "a"),)}
        apart: dict[Register, tuple[tuple[str, ...], ...]] = {
            "decays": (("a.down",), ("a",)),
            "gates": (("z.down",), ("z",)),
        }
        return {"mixed": (("q", "k", "v"),), "rates": (("b",),), **apart}


@dataclass(frozen=True, slots=True)
class GatedDeltaBlock:
    """Implements `AttentionPart`."""

    attention: ClassVar[None] = None
    projections: tuple[Projection, ...]  # to the net's inputs
    net: PackedRecurrence
    output: RowParallelLinear

    @property
    def states(self) -> tuple[StateLayout]:
        return (self.net.net.layout,)

    @staticmethod
    def parameters(spec: GatedDeltaSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        """`net.{q,k,v,z,b,a}`, `net.{z,a}.down` if these are of low rank, the convolution of the first three, `a_log`,
        `dt_bias`, `norm`, `output`. A layer of the same model that attends has other names for its own, which are
        elsewhere in the checkpoint."""
        prefix = f"{prefix}.net"
        shard, heads = layout.shard, spec.heads(layout.shard)

        def by_heads(of: range, dim: int) -> Part:
            return Part(0, range(of.start * dim, of.stop * dim))

        keys, values = by_heads(heads.my_kv, spec.key_dim), by_heads(heads.mine, spec.value_dim)
        rates, decays = Part(0, heads.mine), by_heads(heads.mine, spec.decay_dim)
        parts = {"q": keys, "k": keys, "v": values, "z": values, "b": rates, "a": decays}
        table: dict[str, Parameter] = {}
        for target, layers in spec.layers.items():
            in_features = shard.hidden_size
            for names in layers:
                layer = f"{prefix}.{target}" if len(names) > 1 else ""
                for name in names:
                    shape = (spec.widths[name], in_features)
                    table |= layout.linear(f"{prefix}.{name}", shape, part=parts.get(name), layer=layer)
                in_features = spec.widths[names[0]]
        for name in ("q", "k", "v"):
            conv = (spec.widths[name], 1, spec.conv_width)
            table[f"{prefix}.conv.{name}.weight"] = Parameter(conv, parts[name], dtype=torch.float32)
        table[f"{prefix}.a_log"] = Parameter((spec.num_heads,), rates, dtype=torch.float32)
        table[f"{prefix}.dt_bias"] = Parameter((spec.widths["a"],), decays, dtype=torch.float32)
        table[f"{prefix}.norm.weight"] = Parameter((spec.value_dim,), dtype=torch.float32)
        columns = values.range
        return table | layout.into_hidden(f"{prefix}.output", spec.num_heads * spec.value_dim, columns)

    @staticmethod
    def kv_elements_per_token(spec: GatedDeltaSpec, shard: Shard) -> int:
        return 0

    @staticmethod
    def state_layouts(spec: GatedDeltaSpec, shard: Shard) -> tuple[StateLayout]:
        heads, dims = spec.heads(shard), (spec.key_dim, spec.value_dim, spec.decay_dim)
        return (state_layout(len(heads.mine), len(heads.my_kv), *dims, spec.conv_width),)

    @classmethod
    def load(cls, spec: GatedDeltaSpec, prefix: str, context: BuildContext) -> GatedDeltaBlock:
        prefix = f"{prefix}.net"
        loader, heads = context.loader, spec.heads(context.shard)

        def read(*names: str) -> torch.Tensor:
            return loader.read(*(f"{prefix}.{name}" for name in names))

        decay = read("a_log").exp()
        net = GatedDelta(
            num_key_heads=len(heads.my_kv),
            key_dim=spec.key_dim,
            key_heads=torch.tensor(spec.key_heads(context.shard), device=decay.device),
            conv=read("conv.q.weight", "conv.k.weight", "conv.v.weight").squeeze(1),
            decay=decay,
            decay_bias=read("dt_bias"),
            norm=read("norm.weight"),
            eps=spec.norm_eps,
            strength=spec.strength,
            decay_floor=spec.decay_floor,
            has_sigmoid_gates=spec.has_sigmoid_gates,
            is_apart=spec.rank is not None,
        )
        output_widths = heads.heads.widths(spec.value_dim)
        output = RowParallelLinear.load(f"{prefix}.output", output_widths, context)
        projections = tuple(
            Projection.load(target, [[f"{prefix}.{name}" for name in names] for names in layers], context)
            for target, layers in spec.layers.items()
        )
        return cls(projections, context.ops.pack_recurrence(net), output)

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        for projection in self.projections:
            projection.append_to(program, source)
        mixed, *others = (projection.target for projection in self.projections)
        program.append(AdvanceStates(mixed, "attended", self.net, tuple(others)))
        return "attended"


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer from the block's input to an input of the net, or two of them in sequence."""

    target: Register
    linears: tuple[PackedLinear, ...]
    sites: tuple[int | None, ...]  # adapter sites

    @classmethod
    def load(cls, target: Register, layers: list[list[str]], context: BuildContext) -> Projection:
        linears = tuple(context.linear(*layer) for layer in layers)
        return cls(target, linears, tuple(context.site(*layer) for layer in layers))

    def append_to(self, program: Program, source: Register) -> None:
        last = len(self.linears) - 1
        for index, (linear, site) in enumerate(zip(self.linears, self.sites, strict=True)):
            target: Register = self.target if index == last else "inner"
            program.append(Multiply(source, target, linear, site))
            source = target
