"""Mamba in place of attention: a projection, a convolution, a projection of what was convolved to the rates of the
scan, the scan, output projection. Sharded by channels; all ranks compute the rates of all channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock_server.device.mamba import MambaConv, MambaScan, scan_layout
from penstock_server.device.ops import PackedLinear, PackedNorm, PackedRecurrence
from penstock_server.device.short_conv import state_layout
from penstock_server.device.state import CHUNK_TOKENS, StateLayout
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.norm import NormSpec, load_norm, norm_parameters
from penstock_server.layers.operation import AdvanceStates, Gather, Multiply, Norm, NormHeads, Program, Register
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import Shard
from penstock_server.parallel import RankGroup, Split
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter

_MAX_STATE_DIM = 256  # the limit of every build of the native kernels


@dataclass(frozen=True, slots=True)
class MambaSpec:
    channels: int
    state_dim: int
    step_rank: int  # inner dimension of the projection to the steps
    conv_width: int  # rows that the convolution mixes
    norm_eps: float | None = None  # epsilon of the norms of steps, B and C; None: there are none
    norms_have_weights: bool = True
    has_conv_bias: bool = True
    has_bias: bool = False  # the projection of the input and the one of the output have one
    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name, size, limit in (
            ("intermediate_size", self.channels, None),
            ("time_step_rank", self.step_rank, None),
            ("state_size", self.state_dim, _MAX_STATE_DIM),
            ("conv_kernel", self.conv_width, CHUNK_TOKENS),
        ):
            if size < 1 or (limit is not None and size > limit):
                allowed = "at least 1" if limit is None else f"from 1 to {limit}"
                raise ConfigError(f"config.json: {name} of Mamba must be {allowed}, not {size}")

    def split(self, shard: Shard) -> Split:
        """The channels of each rank."""
        return shard.split(self.channels, "channels of Mamba")

    @property
    def norms(self) -> dict[str, tuple[NormSpec, int]]:
        """The norm of the steps' inner dimension, of B and of C, and the width of each."""
        if self.norm_eps is None:
            return {}
        widths = {"dt_norm": self.step_rank, "b_norm": self.state_dim, "c_norm": self.state_dim}
        return {
            name: (NormSpec("rms", self.norm_eps, None if self.norms_have_weights else width), width)
            for name, width in widths.items()
        }


@dataclass(frozen=True, slots=True)
class MambaBlock:
    """Implements `AttentionPart`."""

    attention: ClassVar[None] = None
    mixed: PackedLinear
    conv: PackedRecurrence
    latents: PackedLinear
    rates: PackedLinear
    norms: tuple[PackedNorm, ...]  # for latents, for B and for C, if the model has norms
    steps: PackedLinear
    scan: PackedRecurrence
    output: RowParallelLinear
    sites: tuple[int | None, ...]  # adapter sites of `mixed`, `latents`, `rates` and `steps`
    group: RankGroup
    widths: tuple[int, ...]  # channels of each rank

    @property
    def states(self) -> tuple[StateLayout, StateLayout]:
        return self.conv.net.layout, self.scan.net.layout

    @staticmethod
    def parameters(spec: MambaSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        """`net.{x,z}`, `conv`, `rates.{dt,b,c}` and their norms, `steps` with `dt_bias`, `a_log`, `skip`, `output`."""
        prefix = f"{prefix}.net"
        mine, size = Part(0, spec.split(layout.shard).mine), spec.channels
        table: dict[str, Parameter] = {}
        for name in ("x", "z"):
            shape, layer = (size, layout.shard.hidden_size), f"{prefix}.mixed"
            table |= layout.linear(f"{prefix}.{name}", shape, bias=spec.has_bias, part=mine, layer=layer)
        table[f"{prefix}.conv.weight"] = Parameter((size, 1, spec.conv_width), mine, dtype=torch.float32)
        if spec.has_conv_bias:
            table[f"{prefix}.conv.bias"] = Parameter((size,), mine, dtype=torch.float32)
        table |= layout.linear(f"{prefix}.rates.dt", (spec.step_rank, size))
        for name in ("b", "c"):
            table |= layout.linear(f"{prefix}.rates.{name}", (spec.state_dim, size), layer=f"{prefix}.rates")
        for name, (norm, width) in spec.norms.items():
            table |= norm_parameters(f"{prefix}.{name}", norm, (width,))
        table |= layout.linear(f"{prefix}.steps", (size, spec.step_rank), part=mine)
        for name in ("dt_bias", "skip"):
            table[f"{prefix}.{name}"] = Parameter((size,), mine, dtype=torch.float32)
        table[f"{prefix}.a_log"] = Parameter((size, spec.state_dim), mine, dtype=torch.float32)
        return table | layout.into_hidden(f"{prefix}.output", size, mine.range, bias=spec.has_bias)

    @staticmethod
    def kv_elements_per_token(spec: MambaSpec, shard: Shard) -> int:
        return 0

    @staticmethod
    def state_layouts(spec: MambaSpec, shard: Shard) -> tuple[StateLayout, StateLayout]:
        channels = len(spec.split(shard).mine)
        return state_layout(channels, spec.conv_width), scan_layout(channels, spec.state_dim)

    @classmethod
    def load(cls, spec: MambaSpec, prefix: str, context: BuildContext) -> MambaBlock:
        prefix = f"{prefix}.net"
        loader, ops, widths = context.loader, context.ops, spec.split(context.shard).widths()
        conv = loader.read(f"{prefix}.conv.weight").squeeze(1)
        conv_bias = loader.read(f"{prefix}.conv.bias") if spec.has_conv_bias else conv.new_zeros(len(conv))
        scan = MambaScan(
            decay=loader.read(f"{prefix}.a_log").exp().T.contiguous(),
            dt_bias=loader.read(f"{prefix}.dt_bias"),
            skip=loader.read(f"{prefix}.skip"),
        )
        groups = ("x", "z"), ("rates.dt",), ("rates.b", "rates.c"), ("steps",)
        linears = [[f"{prefix}.{name}" for name in names] for names in groups]
        mixed, latents, rates, steps = (context.linear(*names) for names in linears)
        return cls(
            mixed=mixed,
            conv=ops.pack_recurrence(MambaConv(conv, conv_bias)),
            latents=latents,
            rates=rates,
            norms=tuple(load_norm(loader, ops, f"{prefix}.{name}", norm) for name, (norm, _) in spec.norms.items()),
            steps=steps,
            scan=ops.pack_recurrence(scan),
            output=RowParallelLinear.load(f"{prefix}.output", widths, context),
            sites=tuple(context.site(*names) for names in linears),
            group=context.shard.group,
            widths=widths,
        )

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        mixed_site, latents_site, rates_site, steps_site = self.sites
        program.append(Multiply(source, "mixed", self.mixed, mixed_site))
        program.append(AdvanceStates("mixed", "convolved", self.conv))
        convolved: Register = "convolved"
        if self.group.size > 1:
            convolved = "gathered"
            program.append(Gather("convolved", convolved, self.group, self.widths))
        program.append(Multiply(convolved, "latents", self.latents, latents_site))
        program.append(Multiply(convolved, "rates", self.rates, rates_site))
        if self.norms:
            latents_norm, *norms = self.norms
            program.append(Norm("latents", "latents", latents_norm))
            program.append(NormHeads("rates", "rates", norms, (1, 1), self.rates.out_features // 2))
        program.append(Multiply("latents", "steps", self.steps, steps_site))
        program.append(AdvanceStates("mixed", "attended", self.scan, ("convolved", "rates", "steps")))
        return "attended"
