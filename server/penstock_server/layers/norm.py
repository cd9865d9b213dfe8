"""Normalization over the last dimension: the variants of RMSNorm and LayerNorm that published models have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock_server.device.ops import NormKind, NormVariant, Ops, PackedNorm
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A `NormVariant` and the parameters that go with it."""

    kind: NormKind
    eps: float
    unweighted_dim: int | None = None  # elements of a norm without weights; None: it has weights
    bias: bool = False
    offset: float = 0.0  # added to the weight; 1 in Gemma and Nemotron
    wide: bool = False

    @property
    def variant(self) -> NormVariant:
        return NormVariant(self.eps, self.kind, self.wide)

    @property
    def has_weight(self) -> bool:
        return self.unweighted_dim is None

    @property
    def is_plain_rms(self) -> bool:
        """Whether it is Llama's."""
        return self == NormSpec("rms", self.eps)


def norm_parameters(
    name: str, spec: NormSpec, shape: tuple[int, ...], part: Part | None = None
) -> dict[str, Parameter]:
    table = {}
    if spec.has_weight:
        table[f"{name}.weight"] = Parameter(shape, part)
    if spec.bias:
        table[f"{name}.bias"] = Parameter(shape, part)
    return table


def load_norm(loader: Loader, ops: Ops, name: str, spec: NormSpec) -> PackedNorm:
    """The norm with its parameters: the offset is added to the weight, which is float32 unless plain."""
    if spec.unweighted_dim is None:
        weight = loader.read(f"{name}.weight")
    else:
        weight = torch.ones(spec.unweighted_dim, dtype=loader.dtype, device=loader.device)
    bias = loader.read(f"{name}.bias") if spec.bias else None
    if not spec.is_plain_rms and (spec.kind == "rms" or weight.dim() > 1):
        weight = weight.float() + spec.offset
    elif spec.offset:
        weight = weight + spec.offset
    return ops.pack_norm(weight, bias, spec.variant)
