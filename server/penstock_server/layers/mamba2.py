"""Mamba 2 in place of attention (Granite 4, Bamba, Nemotron-H): a fused projection, a convolution, the sequence's
state, gated norm, output projection. Lightning attention (MiniMax) is its simplest form. Sharded by heads, as attention
is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock_server.device.mamba2 import Mamba2, convolved_columns, state_layout
from penstock_server.device.ops import NormVariant, PackedLinear, PackedRecurrence
from penstock_server.device.state import CHUNK_TOKENS, StateLayout
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.gates import Gates
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import AdvanceStates, Multiply, NormHeads, Program, Register
from penstock_server.layers.qk_norm import over_projection
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import HeadSplit, Shard
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter

_DIM_MULTIPLE = 16  # dimensions of a state are multiples of it: the lanes of a vector of the native kernels
_MAX_DIM = 256  # the limit of every build of the native kernels
_CONVOLVED = ("x", "b", "c")


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Each of `num_groups` groups of B and C serves `num_heads / num_groups` heads that follow each other."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    conv_width: int  # rows that the convolution mixes; 0, if decays are constant: there is none
    norm_eps: float | None  # epsilon of the norm of each group's gated outputs; None: there is no norm
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    has_conv_bias: bool = True
    has_bias: bool = False  # the projection of the input has one
    output_bias: bool = False
    gate_factor: float = 1.0  # these multiply what the projection makes (Falcon-H1)
    dt_factor: float = 1.0
    conv_factors: tuple[float, float, float] = (1.0, 1.0, 1.0)  # factors of x, B and C
    # Each head's rate of decay, and then there are no time steps and no skip; empty: they are parameters.
    decay: tuple[float, ...] = ()
    norms_all: bool = False  # outputs of all groups are normed together
    gates_normed: bool = False  # a sigmoid gates outputs behind their norm
    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads < 1 or self.num_heads % self.num_groups:
            raise ConfigError(
                f"config.json: {self.num_heads} heads of Mamba 2 are not a multiple of {self.num_groups} groups"
            )
        for name, dim in (("head", self.head_dim), ("state", self.state_dim)):
            if dim % _DIM_MULTIPLE or not 0 < dim <= _MAX_DIM:
                raise ConfigError(
                    f"config.json: the {name} dimension of Mamba 2 must be a multiple of {_DIM_MULTIPLE} up to "
                    f"{_MAX_DIM}, not {dim}"
                )
        if not (self.conv_width == 0 and self.decay) and not 0 < self.conv_width <= CHUNK_TOKENS:
            raise ConfigError(
                f"config.json: the convolution of Mamba 2 must be from 1 to {CHUNK_TOKENS} wide, not {self.conv_width}"
            )

    def heads(self, shard: Shard) -> HeadSplit:
        """The heads of each rank, and groups as its `kv_heads`."""
        return shard.heads(self.num_heads, self.num_groups)

    @property
    def num_kv_heads(self) -> int:
        return self.num_groups

    @property
    def widths(self) -> dict[str, int]:
        """Output features of x, B, C, the gates z, and dt."""
        values, keys = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        steps = {} if self.decay else {"dt": self.num_heads}
        return {"x": values, "b": keys, "c": keys, "z": values, **steps}

    @property
    def mixed(self) -> tuple[str, ...]:
        """What the net reads, in order."""
        return tuple(name for name in self.widths if name != "z" or not self.gates_normed)

    @property
    def num_norm_groups(self) -> int:
        return 1 if self.norms_all else self.num_groups


@dataclass(frozen=True, slots=True)
class Mamba2Block:
    """Implements `AttentionPart`."""

    attention: ClassVar[None] = None
    mixed: PackedLinear
    net: PackedRecurrence
    norm: NormHeads | None
    gates: Gates | None  # they gate normed outputs
    output: RowParallelLinear
    site: int | None  # adapter site of `mixed`

    @property
    def states(self) -> tuple[StateLayout]:
        return (self.net.net.layout,)

    @staticmethod
    def parameters(spec: Mamba2Spec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        """`net.{x,b,c,z,dt}`, the convolution of the first three, `a_log`, `dt_bias`, `skip`, `norm`, `output`."""
        prefix = f"{prefix}.net"
        shard, heads = layout.shard, spec.heads(layout.shard)

        def by_heads(of: range, dim: int) -> Part:
            return Part(0, range(of.start * dim, of.stop * dim))

        groups, values = by_heads(heads.my_kv, spec.state_dim), by_heads(heads.mine, spec.head_dim)
        parts = {"x": values, "b": groups, "c": groups, "z": values, "dt": Part(0, heads.mine)}
        table: dict[str, Parameter] = {}
        for name, width in spec.widths.items():
            shape, layer = (width, shard.hidden_size), f"{prefix}.mixed" if name in spec.mixed else ""
            table |= layout.linear(f"{prefix}.{name}", shape, bias=spec.has_bias, part=parts[name], layer=layer)
        for name in _CONVOLVED if spec.conv_width else ():
            width = spec.widths[name]
            table[f"{prefix}.conv.{name}.weight"] = Parameter(
                (width, 1, spec.conv_width), parts[name], dtype=torch.float32
            )
            if spec.has_conv_bias:
                table[f"{prefix}.conv.{name}.bias"] = Parameter((width,), parts[name], dtype=torch.float32)
        for name in () if spec.decay else ("a_log", "dt_bias", "skip"):
            table[f"{prefix}.{name}"] = Parameter((spec.num_heads,), Part(0, heads.mine), dtype=torch.float32)
        width = spec.widths["x"]
        if spec.norm_eps is not None:
            # A group that several ranks share is normed by each of them.
            is_shared = shard.group.size > spec.num_norm_groups
            table[f"{prefix}.norm.weight"] = Parameter((width,), None if is_shared else values)
        return table | layout.into_hidden(f"{prefix}.output", width, values.range, bias=spec.output_bias)

    @staticmethod
    def kv_elements_per_token(spec: Mamba2Spec, shard: Shard) -> int:
        return 0

    @staticmethod
    def state_layouts(spec: Mamba2Spec, shard: Shard) -> tuple[StateLayout]:
        heads = spec.heads(shard)
        return (state_layout(len(heads.mine), len(heads.my_kv), spec.state_dim, spec.head_dim, spec.conv_width),)

    @classmethod
    def load(cls, spec: Mamba2Spec, prefix: str, context: BuildContext) -> Mamba2Block:
        prefix = f"{prefix}.net"
        loader, heads = context.loader, spec.heads(context.shard)

        def read(*names: str) -> torch.Tensor:
            return loader.read(*(f"{prefix}.{name}" for name in names))

        sizes = len(heads.mine), len(heads.my_kv), spec.state_dim, spec.head_dim
        columns = torch.tensor(convolved_columns(*sizes), device=loader.device)
        conv = conv_bias = None
        if spec.conv_width:
            # A factor of an input of the convolution is one of its weights.
            convs = [read(f"conv.{name}.weight").squeeze(1) for name in _CONVOLVED]
            conv = torch.cat([conv * factor for conv, factor in zip(convs, spec.conv_factors, strict=True)])[columns]
            conv_bias = conv.new_zeros(len(conv))
            if spec.has_conv_bias:
                conv_bias = read(*(f"conv.{name}.bias" for name in _CONVOLVED))[columns]
        if spec.decay:
            decay = torch.tensor(spec.decay, device=loader.device)[heads.mine.start : heads.mine.stop]
            dt_bias = skip = torch.zeros_like(decay)
        else:
            decay, dt_bias, skip = read("a_log").exp(), read("dt_bias"), read("skip")
        net = Mamba2(
            num_groups=len(heads.my_kv),
            state_dim=spec.state_dim,
            head_dim=spec.head_dim,
            columns=columns,
            conv=conv,
            conv_bias=conv_bias,
            decay=decay,
            dt_bias=dt_bias,
            skip=skip,
            dt_limits=spec.dt_limits,
            gate_factor=spec.gate_factor,
            dt_factor=spec.dt_factor,
            has_gates=not spec.gates_normed,
            has_dt=not spec.decay,
        )
        names = [f"{prefix}.{name}" for name in spec.mixed]
        return cls(
            mixed=context.linear(*names),
            net=context.ops.pack_recurrence(net),
            norm=None if spec.norm_eps is None else _load_norm(spec, spec.norm_eps, f"{prefix}.norm", context),
            gates=Gates.load(f"{prefix}.z", context) if spec.gates_normed else None,
            output=RowParallelLinear.load(f"{prefix}.output", heads.heads.widths(spec.head_dim), context),
            site=context.site(*names),
        )

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        program.append(Multiply(source, "mixed", self.mixed, self.site))
        program.append(AdvanceStates("mixed", "attended", self.net))
        if self.norm is not None:
            program.append(self.norm)
        if self.gates is not None:
            self.gates.append_to(program, source, "attended")
        return "attended"


def _load_norm(spec: Mamba2Spec, eps: float, name: str, context: BuildContext) -> NormHeads:
    """The norm of each group. A group that several ranks share is gathered first."""
    heads, shard, device = spec.heads(context.shard), context.shard, context.loader.device
    num_groups = spec.num_norm_groups
    group_width = spec.widths["x"] // num_groups
    weight = context.loader.read(f"{name}.weight").float().view(-1, group_width)
    norm = context.ops.pack_norm(weight, None, NormVariant(eps, "rms", is_wide=True))
    if shard.group.size <= num_groups:
        return NormHeads(
            "attended", "attended", (norm,), (len(heads.mine) * spec.head_dim // group_width,), group_width
        )
    gathered = over_projection(norm, heads.heads.parts, spec.head_dim, shard, device, num_groups)
    return NormHeads("attended", "attended", (gathered,), (len(heads.mine),), spec.head_dim)
