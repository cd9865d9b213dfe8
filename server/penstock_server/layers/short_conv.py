"""A short convolution in place of attention (LFM2): a fused projection, a convolution between two gates, output
projection. Sharded by channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock_server.device.ops import PackedLinear, PackedRecurrence
from penstock_server.device.short_conv import ShortConv, state_layout
from penstock_server.device.state import CHUNK_TOKENS, StateLayout
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import AdvanceStates, Multiply, Program, Register
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import Shard
from penstock_server.parallel import Split
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter

INPUTS = ("b", "c", "x")


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """As many channels as the hidden size has."""

    width: int  # rows that the convolution mixes
    has_bias: bool = False  # the convolution and both projections have one
    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 < self.width <= CHUNK_TOKENS:
            raise ConfigError(f"config.json: conv_L_cache must be from 1 to {CHUNK_TOKENS}, not {self.width}")

    def channels(self, shard: Shard) -> Split:
        """The channels of each rank."""
        return shard.split(shard.hidden_size, "hidden size")


@dataclass(frozen=True, slots=True)
class ShortConvBlock:
    """Implements `AttentionPart`."""

    attention: ClassVar[None] = None
    inputs: PackedLinear
    net: PackedRecurrence
    output: RowParallelLinear
    site: int | None  # adapter site of `inputs`

    @property
    def states(self) -> tuple[StateLayout]:
        return (self.net.net.layout,)

    @staticmethod
    def parameters(spec: ShortConvSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        """`net.{b,c,x}`, `conv`, `output`. A layer of the same model that attends has other names for its own."""
        prefix = f"{prefix}.net"
        size, mine = layout.shard.hidden_size, spec.channels(layout.shard).mine
        table: dict[str, Parameter] = {}
        for name in INPUTS:
            shape, layer = (size, size), f"{prefix}.inputs"
            table |= layout.linear(f"{prefix}.{name}", shape, bias=spec.has_bias, part=Part(0, mine), layer=layer)
        table[f"{prefix}.conv.weight"] = Parameter((size, 1, spec.width), Part(0, mine), dtype=torch.float32)
        if spec.has_bias:
            table[f"{prefix}.conv.bias"] = Parameter((size,), Part(0, mine), dtype=torch.float32)
        return table | layout.into_hidden(f"{prefix}.output", size, mine, bias=spec.has_bias)

    @staticmethod
    def kv_elements_per_token(spec: ShortConvSpec, shard: Shard) -> int:
        return 0

    @staticmethod
    def state_layouts(spec: ShortConvSpec, shard: Shard) -> tuple[StateLayout]:
        return (state_layout(len(spec.channels(shard).mine), spec.width),)

    @classmethod
    def load(cls, spec: ShortConvSpec, prefix: str, context: BuildContext) -> ShortConvBlock:
        prefix = f"{prefix}.net"
        conv = context.loader.read(f"{prefix}.conv.weight").squeeze(1)
        bias = conv.new_zeros(len(conv))
        if spec.has_bias:
            bias = context.loader.read(f"{prefix}.conv.bias")
        inputs = [f"{prefix}.{name}" for name in INPUTS]
        return cls(
            inputs=context.linear(*inputs),
            net=context.ops.pack_recurrence(ShortConv(conv, bias)),
            output=RowParallelLinear.load(f"{prefix}.output", spec.channels(context.shard).widths(), context),
            site=context.site(*inputs),
        )

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        program.append(Multiply(source, "mixed", self.inputs, self.site))
        program.append(AdvanceStates("mixed", "attended", self.net))
        return "attended"
