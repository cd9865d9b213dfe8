"""Gates of what a layer attended to: sigmoids of a projection of its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock_server.device.ops import Elementwise, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.operation import Gate, Multiply, Program, Register


@dataclass(frozen=True, slots=True)
class Gates:
    linear: PackedLinear
    sigmoid: Elementwise
    site: int | None  # adapter site

    @classmethod
    def load(cls, name: str, context: BuildContext) -> Gates:
        return cls(context.linear(name), context.ops.elementwise(torch.sigmoid), context.site(name))

    def append_to(
        self, program: Program, source: Register, target: Register, heads: tuple[int, int] | None = None
    ) -> None:
        """Appends the gating of the target, given the layer's input. heads: as of `Gate`."""
        program.append(Multiply(source, "gates", self.linear, self.site))
        program.append(Gate("gates", target, self.sigmoid, heads))
