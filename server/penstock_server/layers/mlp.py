"""The MLP of one layer: down(act(gate(x)) * up(x)) with gate and up fused, or down(act(up(x))).

Sharded by its intermediate dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.activation import ACTIVATIONS, Xielu
from penstock_server.device.ops import Elementwise, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import Activate, Convert, Multiply, Program, Register
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter

XIELU_NAMES = ("alpha_p", "alpha_n")


@dataclass(frozen=True, slots=True)
class MlpSpec:
    intermediate_size: int
    activation: str = "silu"  # a key of ACTIVATIONS, or "xielu", whose parameters are learned
    gated: bool = True
    bias: bool = False  # gate and up have a bias
    down_bias: bool = False
    is_wide: bool = False  # down in float32 if the model is float16, whose range its sums exceed (T5)

    @property
    def is_swiglu(self) -> bool:
        """Whether `Ops.pack_gate_up` computes it."""
        return self.gated and ACTIVATIONS.get(self.activation) is ACTIVATIONS["silu"]

    @property
    def inner_names(self) -> tuple[str, ...]:
        return ("gate", "up") if self.gated else ("up",)

    @property
    def widths(self) -> dict[str, int]:
        """Output features of gate and up, for checkpoints that store them as one tensor."""
        return dict.fromkeys(("gate", "up"), self.intermediate_size)


@dataclass(frozen=True, slots=True)
class ActivatedLinear:
    """Up, or gate and up, and what is computed of them, where no operator does both."""

    linear: PackedLinear
    activation: Elementwise

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


@dataclass(frozen=True, slots=True)
class Mlp:
    inner: PackedLinear | ActivatedLinear  # [rows, hidden] → [rows, intermediate on this rank]
    down: RowParallelLinear
    site: int | None  # adapter site of `inner`
    gate: Elementwise | None  # gate and up → `inner`'s result, if it is one operator and adapters change its product
    is_gated: bool
    dtype: torch.dtype  # dtype of the input

    @staticmethod
    def parameters(spec: MlpSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        columns = layout.shard.split(spec.intermediate_size, "intermediate size").mine
        shape = (spec.intermediate_size, layout.shard.hidden_size)
        table: dict[str, Parameter] = {}
        for name in spec.inner_names:
            part, layer = Part(0, columns), f"{prefix}.inner"
            table |= layout.linear(f"{prefix}.{name}", shape, bias=spec.bias, part=part, layer=layer)
        if spec.activation == "xielu":
            table |= {f"{prefix}.{name}": Parameter((1,)) for name in XIELU_NAMES}
        return table | layout.into_hidden(
            f"{prefix}.down", spec.intermediate_size, columns, bias=spec.down_bias, is_wide=spec.is_wide
        )

    @classmethod
    def load(cls, spec: MlpSpec, prefix: str, context: BuildContext) -> Mlp:
        widths = context.shard.split(spec.intermediate_size, "intermediate size").widths()
        site = context.site(*(f"{prefix}.{name}" for name in spec.inner_names))
        inner = _load_inner(spec, prefix, context, site)
        gate = None if site is None or not spec.is_swiglu else context.ops.gated(ACTIVATIONS["silu"])
        down = RowParallelLinear.load(f"{prefix}.down", widths, context)
        return cls(inner, down, site, gate, spec.gated, context.loader.dtype)

    def append_to(self, program: Program, source: Register, target: Register) -> None:
        """Appends [rows, hidden] → the same, on all ranks."""
        if isinstance(self.inner, ActivatedLinear):
            program.append(Multiply(source, "inner", self.inner.linear, self.site))
            program.append(Activate("inner", "activated", self.inner.activation, self.is_gated))
        else:
            program.append(Multiply(source, "activated", self.inner, self.site, self.gate))
        if self.down.dtype != self.dtype:
            program.append(Convert("activated", "activated", self.down.dtype))
        self.down.append_to(program, "activated", target)


def _load_inner(spec: MlpSpec, prefix: str, context: BuildContext, site: int | None) -> PackedLinear | ActivatedLinear:
    names = [f"{prefix}.{name}" for name in spec.inner_names]
    # Adapters change gate and up before the activation. A native stack computes them apart in a program of its own.
    if spec.is_swiglu and (site is None or not context.ops.adds_adapters):
        return context.linear(*names, gated=True)
    linear = context.linear(*names)
    if spec.activation == "xielu":
        activation: Elementwise = Xielu.learned(*(context.loader.read(f"{prefix}.{name}") for name in XIELU_NAMES))
    else:
        activation = ACTIVATIONS[spec.activation]
    wrap = context.ops.gated if spec.gated else context.ops.elementwise
    return ActivatedLinear(linear, wrap(activation))
