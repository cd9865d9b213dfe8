"""Linear layers whose input is split over the ranks and whose output every rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import Linear
from penstock_server.layers.native_stack import NativeProgram, NotNativeError, Register
from penstock_server.layers.shard import Shard
from penstock_server.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """From a dimension that is split over the ranks to the hidden dimension. `Shard.exact` selects how."""

    linear: Linear
    shard: Shard
    in_widths: tuple[int, ...]  # input features on each rank
    dtype: torch.dtype  # of inputs and outputs
    site: int | None

    @classmethod
    def load(cls, name: str, in_widths: tuple[int, ...], context: BuildContext) -> RowParallelLinear:
        shard, weights = context.shard, context.weights(name)
        if not shard.exact and shard.group.rank != 0:
            weights = weights.without_bias()  # rank 0 adds it to the sum
        site = context.site(name)
        return cls(context.adapted(weights.pack(context.ops), site), shard, in_widths, weights.dtype, site)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, input features on this rank] → [rows, hidden], the same on all ranks."""
        shard = self.shard
        if not shard.exact:
            return shard.group.all_reduce(self.linear(x, step))
        gathered = shard.group.all_gather_columns(x, self.in_widths)
        return shard.group.all_gather_columns(self.linear(gathered, step), shard.hidden.widths())

    def append_to(self, program: NativeProgram, source: Register, target: Register, *, adds: bool = False) -> None:
        """Appends the layer to a native stack. adds: to what is in the target."""
        shard = self.shard
        if shard.group.size == 1 and not program.adapts:
            program.linear(self.linear, source, target, adds=adds)
            return
        if shard.group.size == 1:
            product: Register = "part" if adds else target
            program.linear(self.linear, source, product)
            program.adapt(self.site, source, product)
            if adds:
                program.add(product, target)
            return
        if not shard.exact:
            raise NotNativeError("sums over ranks")
        program.gather(shard.group, self.in_widths, source, "gathered")
        program.linear(self.linear, "gathered", "part")
        program.adapt(self.site, "gathered", "part")
        program.gather(shard.group, shard.hidden.widths(), "part", "gathered" if adds else target)
        if adds:
            program.add("gathered", target)
