"""The gated MLP of one layer: down(silu(gate(x)) * up(x)), gate and up as one matrix.

Sharded by its intermediate dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.layers.linear import Layout, LinearOut, read_fused
from penstock_server.weights.loader import Loader


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: PackedLinear  # with the activation: [rows, hidden] → [rows, intermediate on this rank]
    down: LinearOut

    @classmethod
    def load(cls, loader: Loader, prefix: str, ops: Ops, layout: Layout) -> GatedMlp:
        gate_up = ops.pack_gate_up(*read_fused(loader, [f"{prefix}.gate", f"{prefix}.up"]))
        return cls(gate_up, LinearOut.load(loader, ops, f"{prefix}.down", layout))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        return self.down(self.gate_up(x))
