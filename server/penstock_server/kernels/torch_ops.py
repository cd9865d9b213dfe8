"""The operators in plain torch, on any device. On a CPU in bfloat16 linear layers use oneDNN with weights packed once.

Results of a row may depend on how many rows there are: matrix libraries choose their kernels by shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.kernels.ops import Elementwise, Lookup, PackedLinear, Weight, whole


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight as it is."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """The weight in oneDNN's blocked layout. PERF: 2.2 × F.linear at 8 rows of a [49152, 576] head (Zen 4)."""

    packed: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty((0, self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class GateUp:
    """Two projections as one matrix, and what is made of them."""

    linear: PackedLinear
    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        return silu_multiply(self.linear(x))


class TorchOps:
    name = "torch"

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        weight = whole(weight)
        out_features, in_features = weight.shape
        if _onednn_packs(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            return OneDnnLinear(packed, bias, out_features, in_features)
        return PlainLinear(weight, bias, out_features, in_features)

    def pack_tied(self, weight: Weight) -> tuple[PackedLinear, Lookup]:
        weight = whole(weight)
        return self.pack_linear(weight, None), partial(F.embedding, weight=weight)

    def pack_gate_up(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        return GateUp(self.pack_linear(weight, bias), weight.shape[0] // 2, weight.shape[1])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotate(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        half = cos.shape[-1]
        cos, sin = cos[positions][:, None], sin[positions][:, None]  # [rows, 1, rotary_dim / 2]
        for x in (queries, keys):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            # Both halves before either is written: in float32 `first` and `second` are views of x.
            turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
            x[..., :half] = turned_first.to(x.dtype)
            x[..., half : 2 * half] = turned_second.to(x.dtype)

    def elementwise(self, function: Elementwise) -> Elementwise:
        return function

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        return silu_multiply(gate_up)


def silu_multiply(gate_up: Tensor) -> Tensor:
    """[rows, 2 * dim] → silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _onednn_packs(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
