"""Normalization over the last dimension: the variants of RMSNorm and LayerNorm that published models have."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.kernels.ops import NormKind, NormVariant, Ops, PackedNorm
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A `NormVariant` and the parameters that go with it."""

    kind: NormKind
    eps: float
    weight: bool = True
    bias: bool = False
    offset: float = 0.0  # added to the weight; 1 in Gemma and Nemotron
    wide: bool = False

    @property
    def variant(self) -> NormVariant:
        return NormVariant(self.eps, self.kind, self.wide)

    @property
    def is_plain_rms(self) -> bool:
        """Whether it is Llama's."""
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


def load_norm(loader: Loader, ops: Ops, name: str, spec: NormSpec) -> PackedNorm:
    """The norm with its parameters: the offset is added to the weight, which is float32 unless plain."""
    weight = loader.read(f"{name}.weight") if spec.weight else None
    bias = loader.read(f"{name}.bias") if spec.bias else None
    if weight is not None and not spec.is_plain_rms and (spec.kind == "rms" or weight.dim() > 1):
        weight = weight.float() + spec.offset
    elif weight is not None and spec.offset:
        weight = weight + spec.offset
    return ops.pack_norm(weight, bias, spec.variant)
