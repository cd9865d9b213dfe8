"""A gated delta network in place of attention (Qwen3-Next, Qwen3.5): fused projections, a convolution, the delta rule
over the sequence's state, gated norm, output projection. Sharded by heads, as attention is.
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
    def widths(self) -> dict[str, int]:
        """Output features of queries, keys, values and output gates."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values}

    @property
    def rates(self) -> dict[str, int]:
        """Output features of the projections of a number per head."""
        return {"b": self.num_heads, "a": self.num_heads}


@dataclass(frozen=True, slots=True)
class GatedDeltaBlock:
    """Implements `AttentionPart`."""

    attention: ClassVar[None] = None
    mixed: PackedLinear
    rates: PackedLinear
    net: PackedRecurrence
    output: RowParallelLinear
    sites: tuple[int | None, int | None]  # adapter sites of `mixed` and of `rates`

    @property
    def states(self) -> tuple[StateLayout]:
        return (self.net.net.layout,)

    @staticmethod
    def parameters(spec: GatedDeltaSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        """`net.{q,k,v,z,b,a}`, the convolution of the first three, `a_log`, `dt_bias`, `norm`, `output`. A layer of
        the same model that attends has other names for its own, which are elsewhere in the checkpoint."""
        prefix = f"{prefix}.net"
        shard, heads = layout.shard, spec.heads(layout.shard)

        def by_heads(of: range, dim: int) -> Part:
            return Part(0, range(of.start * dim, of.stop * dim))

        keys, values = by_heads(heads.my_kv, spec.key_dim), by_heads(heads.mine, spec.value_dim)
        parts = {"q": keys, "k": keys, "v": values, "z": values}
        table: dict[str, Parameter] = {}
        for name, width in spec.widths.items():
            shape, layer = (width, shard.hidden_size), f"{prefix}.mixed"
            table |= layout.linear(f"{prefix}.{name}", shape, part=parts[name], layer=layer)
        for name, width in spec.rates.items():
            shape, layer = (width, shard.hidden_size), f"{prefix}.rates"
            table |= layout.linear(f"{prefix}.{name}", shape, part=Part(0, heads.mine), layer=layer)
        for name in ("q", "k", "v"):
            conv = (spec.widths[name], 1, spec.conv_width)
            table[f"{prefix}.conv.{name}.weight"] = Parameter(conv, parts[name], dtype=torch.float32)
        for name in ("a_log", "dt_bias"):
            table[f"{prefix}.{name}"] = Parameter((spec.num_heads,), Part(0, heads.mine), dtype=torch.float32)
        table[f"{prefix}.norm.weight"] = Parameter((spec.value_dim,), dtype=torch.float32)
        columns = values.range
        return table | layout.into_hidden(f"{prefix}.output", spec.num_heads * spec.value_dim, columns)

    @staticmethod
    def kv_elements_per_token(spec: GatedDeltaSpec, shard: Shard) -> int:
        return 0

    @staticmethod
    def state_layouts(spec: GatedDeltaSpec, shard: Shard) -> tuple[StateLayout]:
        heads = spec.heads(shard)
        return (state_layout(len(heads.mine), len(heads.my_kv), spec.key_dim, spec.value_dim, spec.conv_width),)

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
        )
        output_widths = heads.heads.widths(spec.value_dim)
        output = RowParallelLinear.load(f"{prefix}.output", output_widths, context)
        mixed, rates = ([f"{prefix}.{name}" for name in names] for names in (spec.widths, spec.rates))
        return cls(
            mixed=context.linear(*mixed),
            rates=context.linear(*rates),
            net=context.ops.pack_recurrence(net),
            output=output,
            sites=(context.site(*mixed), context.site(*rates)),
        )

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        program.append(Multiply(source, "mixed", self.mixed, self.sites[0]))
        program.append(Multiply(source, "rates", self.rates, self.sites[1]))
        program.append(AdvanceStates("mixed", "attended", self.net, ("rates",)))
        return "attended"
