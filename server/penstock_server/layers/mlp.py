"""The MLP of one layer: down(act(gate(x)) * up(x)), gate and up as one matrix, or down(act(up(x))).

Sharded by its intermediate dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from penstock_server.kernels.activation import ACTIVATIONS, xielu
from penstock_server.kernels.ops import Elementwise, Ops, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import Layout, LinearOut, out_parameters, read_fused, rows_parameters
from penstock_server.layers.shard import Shard
from penstock_server.weights.loader import Loader, Parameter

XIELU_NAMES = ("alpha_p", "alpha_n")


@dataclass(frozen=True, slots=True)
class MlpSpec:
    intermediate_size: int
    activation: str = "silu"  # a key of ACTIVATIONS, or "xielu", whose parameters are learned
    gated: bool = True
    bias: bool = False  # of gate and up
    down_bias: bool = False
    is_wide: bool = False  # down in float32 where float16 is too narrow for its sums (T5)

    @property
    def is_swiglu(self) -> bool:
        """What `Ops.pack_gate_up` computes."""
        return self.gated and ACTIVATIONS.get(self.activation) is ACTIVATIONS["silu"]

    @property
    def inner_names(self) -> tuple[str, ...]:
        return ("gate", "up") if self.gated else ("up",)

    @property
    def widths(self) -> dict[str, int]:
        """The rows of gate and up, for checkpoints that keep them in one tensor."""
        return dict.fromkeys(("gate", "up"), self.intermediate_size)


@dataclass(frozen=True, slots=True)
class ActivatedLinear:
    """What stands before the projection down, where no operator does it in one."""

    linear: PackedLinear  # gate and up, or up
    activation: Elementwise
    gated: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not self.gated:
            return self.activation(x)
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up


@dataclass(frozen=True, slots=True)
class Mlp:
    inner: PackedLinear | ActivatedLinear  # [rows, hidden] → [rows, intermediate on this rank]
    down: LinearOut

    @staticmethod
    def parameters(spec: MlpSpec, prefix: str, hidden_size: int, shard: Shard) -> dict[str, Parameter]:
        part = shard.split(spec.intermediate_size, "intermediate size").mine
        shape = (spec.intermediate_size, hidden_size)
        table: dict[str, Parameter] = {}
        for name in spec.inner_names:
            table |= rows_parameters(f"{prefix}.{name}", shape, part, spec.bias)
        if spec.activation == "xielu":
            table |= {f"{prefix}.{name}": Parameter((1,)) for name in XIELU_NAMES}
        down = out_parameters(f"{prefix}.down", (shape[1], shape[0]), part, shard, spec.down_bias)
        return table | {name: replace(parameter, is_wide=spec.is_wide) for name, parameter in down.items()}

    @classmethod
    def load(cls, spec: MlpSpec, prefix: str, context: BuildContext) -> Mlp:
        loader, ops, shard = context.loader, context.ops, context.shard
        layout = Layout.into_hidden(shard, shard.split(spec.intermediate_size, "intermediate size").widths())
        inner = load_inner(spec, prefix, loader, ops)
        return cls(inner, LinearOut.load(loader, ops, f"{prefix}.down", layout))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        return self.down(self.inner(x).to(self.down.dtype))


def load_inner(spec: MlpSpec, prefix: str, loader: Loader, ops: Ops) -> PackedLinear | ActivatedLinear:
    """[rows, hidden] → [rows, intermediate on this rank]: what stands before the projection down."""
    weight, bias = read_fused(loader, [f"{prefix}.{name}" for name in spec.inner_names])
    if spec.is_swiglu:
        return ops.pack_gate_up(weight, bias)
    if spec.activation == "xielu":
        activation = xielu(*(loader.read(f"{prefix}.{name}") for name in XIELU_NAMES))
    else:
        activation = ACTIVATIONS[spec.activation]
    return ActivatedLinear(ops.pack_linear(weight, bias), ops.elementwise(activation), spec.gated)
