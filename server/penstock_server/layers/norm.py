"""Normalization over the last dimension: the variants of RMSNorm and LayerNorm that published models have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.kernels.ops import Ops
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


@dataclass(frozen=True, slots=True)
class NormSpec:
    """LayerNorm, and RMSNorm with `wide`, compute in float32 and round to the model's dtype at the end. RMSNorm without
    `wide` rounds before it multiplies by the weight, as Llama does."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    offset: float = 0.0  # added to the weight; 1 in Gemma and Nemotron
    wide: bool = False

    @property
    def is_plain_rms(self) -> bool:
        """Whether `Ops.rms_norm` computes it."""
        return self == NormSpec("rms", self.eps)


def norm_parameters(
    name: str, spec: NormSpec, shape: tuple[int, ...], part: Part | None = None
) -> dict[str, Parameter]:
    table = {}
    if spec.weight:
        table[f"{name}.weight"] = Parameter(shape, part)
    if spec.bias:
        table[f"{name}.bias"] = Parameter(shape, part)
    return table


@dataclass(frozen=True, slots=True)
class Norm:
    spec: NormSpec
    weight: Tensor | None  # [dim], or [heads, dim]; offset included; float32 unless `Ops.rms_norm` or torch takes it
    bias: Tensor | None
    ops: Ops

    @classmethod
    def load(cls, loader: Loader, ops: Ops, name: str, spec: NormSpec) -> Norm:
        weight = loader.read(f"{name}.weight") if spec.weight else None
        bias = loader.read(f"{name}.bias") if spec.bias else None
        if weight is not None and not spec.is_plain_rms and (spec.kind == "rms" or weight.dim() > 1):
            weight = weight.float() + spec.offset
        elif weight is not None and spec.offset:
            weight = weight + spec.offset
        return cls(spec, weight, bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim], or [..., heads, dim] if each head has a weight of its own → the same shape."""
        spec, weight = self.spec, self.weight
        if spec.is_plain_rms and weight is not None and weight.dim() == 1:
            # Queries and keys may be strided views of the fused projection.
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return self.ops.rms_norm(rows, weight, spec.eps).view(x.shape)
        if spec.kind == "layer" and (weight is None or weight.dim() == 1):
            return F.layer_norm(x, x.shape[-1:], weight, self.bias, spec.eps)
        wide = x.float()
        if spec.kind == "layer":
            wide = F.layer_norm(wide, x.shape[-1:], eps=spec.eps)
        else:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
        if not spec.wide and spec.kind == "rms":
            wide = wide.to(x.dtype)
        if weight is not None:
            wide = wide * weight
        if self.bias is not None:
            wide = wide + self.bias
        return wide.to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual in place, and returns the norm of the sum. Both [rows, dim]."""
        if self.spec.is_plain_rms and self.weight is not None:
            return self.ops.add_rms_norm(x, residual, self.weight, self.spec.eps)
        residual += x
        return self(residual)
