"""The operators in plain torch, on any device. On a CPU in bfloat16, linear layers are packed once for oneDNN.

A row's result may depend on the number of rows: matrix libraries select their kernels by shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.ops import (
    Elementwise,
    HeadProduct,
    Lookup,
    NormVariant,
    PackedLinear,
    PackedNorm,
    PackedRecurrence,
    QuantizedPacker,
    Summand,
    Weight,
    norm_dtype,
    whole,
)
from penstock_server.device.quantized import Kept
from penstock_server.device.reference.recurrence import TorchRecurrence
from penstock_server.device.state import Recurrence


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
class WideLinear:
    """The weight in float64 on a CPU, for the reason that `widened` states; on a GPU as it is, since products of its
    tensor cores are exact and summed in float32."""

    weight: Tensor
    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return F.linear(x.double(), self.weight).float()
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class GateUp:
    """Gate and up as one matrix, and silu(gate) * up of its output."""

    linear: PackedLinear
    gate: Elementwise
    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.gate(self.linear(x))


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """Implements `PackedNorm`."""

    ops: TorchOps
    weight: Tensor
    bias: Tensor | None
    variant: NormVariant

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.ops.norm(x, self.weight, self.bias, self.variant, residual)


class TorchOps:
    """Implements `Ops`."""

    name = "torch"
    kept = Kept(any=False)
    groups_experts = False
    adds_adapters = False

    @property
    def quantized_packer(self) -> QuantizedPacker | None:
        return None

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        weight = whole(weight)
        out_features, in_features = weight.shape
        if _has_onednn(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            return OneDnnLinear(packed, bias, out_features, in_features)
        return PlainLinear(weight, bias, out_features, in_features)

    def pack_wide(self, weight: Tensor) -> PackedLinear:
        return WideLinear(weight.double() if weight.device.type == "cpu" else weight, *weight.shape)

    def pack_tied(self, weight: Weight) -> tuple[PackedLinear, Lookup]:
        weight = whole(weight)
        return self.pack_linear(weight, None), partial(F.embedding, weight=weight)

    def pack_gate_up(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        linear = self.pack_linear(weight, bias)
        return GateUp(linear, self.gated(F.silu), linear.out_features // 2, linear.in_features)

    def pack_heads(self, weight: Tensor) -> HeadProduct | None:
        if weight.device.type == "cpu":
            return None  # so that each head has a weight that oneDNN packs
        return partial(_multiply_heads, weight.transpose(1, 2).contiguous())

    def pack_norm(self, weight: Tensor, bias: Tensor | None, variant: NormVariant) -> PackedNorm:
        return TorchNorm(self, weight, bias, variant)

    def add(self, residual: Tensor, summand: Summand, norm: PackedNorm | None) -> Tensor:
        return summand.add_to(residual, norm)

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        variant: NormVariant,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `PackedNorm`."""
        if residual is not None:
            x = residual.add_(x)
        eps = variant.eps
        if variant.kind == "layer" and weight.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        wide, dtype = x.float(), norm_dtype(x, weight)
        if variant.kind == "layer":
            wide = F.layer_norm(wide, x.shape[-1:], eps=eps)
        else:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if variant.kind == "rms" and not variant.is_wide:
            wide = wide.to(dtype)
        wide = wide * weight
        if bias is not None:
            wide = wide + bias
        return wide.to(dtype)

    def rotate(
        self,
        queries: Tensor,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        half = cos.shape[-1]
        cos, sin = cos[positions][:, None], sin[positions][:, None]  # [rows, 1, rotary_dim / 2]
        for x in (queries, keys):
            rotary = x[..., : 2 * half]
            pair = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.split(half, -1)
            first, second = (part.float() for part in pair)
            # Compute both before writing either: in float32, `first` and `second` are views of x.
            rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin
            pair[0].copy_(rotated_first)
            pair[1].copy_(rotated_second)

    def elementwise(self, function: Elementwise) -> Elementwise:
        return function

    def gated(self, activation: Elementwise) -> Elementwise:
        return partial(_gated, activation)

    def pack_recurrence(self, net: Recurrence) -> PackedRecurrence:
        return TorchRecurrence(net)


def widened(x: Tensor) -> Tensor:
    """float64 on a CPU, float32 elsewhere.

    On a CPU, torch computes exponentials differently at the end of a vector loop, and matrix products by their shape,
    so a result would depend on its place in the batch. In float64 the difference is lost when the result is rounded to
    float32.
    """
    return x.double() if x.device.type == "cpu" else x.float()


def _multiply_heads(weight: Tensor, x: Tensor, out: Tensor) -> None:
    """weight [heads, in, out]"""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def _gated(activation: Elementwise, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


def _has_onednn(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
