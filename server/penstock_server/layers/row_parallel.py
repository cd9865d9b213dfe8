"""Linear layers whose input is split over the ranks and whose output every rank has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from penstock_server.device.ops import PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.operation import Gather, Multiply, Program, Reduce, Register
from penstock_server.layers.shard import Shard


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """From a dimension that is split over the ranks to the hidden dimension. `Shard.exact` selects how."""

    linear: PackedLinear
    shard: Shard
    in_widths: tuple[int, ...]  # input features on each rank
    dtype: torch.dtype  # dtype of inputs and outputs
    site: int | None

    @classmethod
    def load(cls, name: str, in_widths: tuple[int, ...], context: BuildContext) -> RowParallelLinear:
        shard, weights = context.shard, context.weights(name)
        if not shard.exact and shard.group.rank != 0:
            weights = weights.without_bias()  # rank 0 adds it to the sum
        return cls(weights.pack(context.ops), shard, in_widths, weights.dtype, context.site(name))

    def append_to(self, program: Program, source: Register, target: Register) -> None:
        """Appends what makes [rows, hidden], the same on all ranks, of this rank's input features."""
        shard = self.shard
        multiply = partial(Multiply, linear=self.linear, site=self.site)
        if shard.group.size == 1:
            program.append(multiply(source, target))
        elif shard.exact:
            program.append(Gather(source, "gathered", shard.group, self.in_widths))
            program.append(multiply("gathered", "part"))
            program.append(Gather("part", target, shard.group, shard.hidden.widths()))
        else:
            program.append(multiply(source, target))
            program.append(Reduce(target, target, shard.group))
