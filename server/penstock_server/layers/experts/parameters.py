"""The parameters of a mixture of experts: how checkpoints store them, and which part of each a rank reads.

Parameter names do not depend on the storage; `STORAGES` says what dimensions they have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import STORAGES, MoeSpec
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.linear import DenseWeights, LinearWeights
from penstock_server.layers.mlp import Mlp
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter

# The dimension of a matrix that its inputs are in.
INPUTS = {"gate": "h", "up": "h", "gate_up": "h", "down": "i"}


def moe_parameters(spec: MoeSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
    """`prefix.router.{weight,bias,correction}`, `prefix.experts.{gate,up,gate_up,down}.{weight,bias}`,
    `prefix.shared.{gate,up,down}.weight`, `prefix.shared_gate.weight`."""
    num_experts, hidden_size = spec.routing.num_experts, layout.shard.hidden_size
    router, routing = (num_experts, hidden_size), spec.routing
    table = layout.linear(f"{prefix}.router", router, bias=routing.has_bias, is_dense=routing.is_wide)
    if spec.routing.has_correction:
        table[f"{prefix}.router.correction"] = Parameter((num_experts,), dtype=torch.float32)
    for name, matrix in _matrices(spec, ExpertShard.of(spec, layout.shard)).items():
        name = f"{prefix}.experts.{name}"
        bias = matrix.bias.parameter() if matrix.bias is not None else None
        weight = replace(matrix.weight.parameter(), layer="" if name.endswith(".down") else f"{prefix}.experts.inner")
        table |= layout.scheme_of(name).parameters(name, weight, bias)
    if spec.shared is not None:
        table |= Mlp.parameters(spec.shared, f"{prefix}.shared", layout)
    if spec.shared_is_gated:
        table |= layout.linear(f"{prefix}.shared_gate", (1, hidden_size))
    return table


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight or bias of one expert or of all experts: its dimensions by their letters, and the part that is read."""

    pattern: str  # as in STORAGES
    sizes: dict[str, int]
    split: str | None = None  # the dimension that is split over the ranks
    part: range = field(default=range(0))  # this rank's part of it

    @classmethod
    def of(cls, pattern: str, sizes: dict[str, int], parts: dict[str, range]) -> StoredTensor:
        """parts: this rank's part by dimension; at most one of these dimensions is in the pattern."""
        split = next((dim for dim in parts if dim in pattern), None)
        return cls(pattern, sizes) if split is None else cls(pattern, sizes, split, parts[split])

    def parameter(self) -> Parameter:
        shape = tuple(math.prod(self.sizes[dim] for dim in folded) for folded in self.pattern.split())
        if self.split is None:
            return Parameter(shape)
        view = tuple(self.sizes[dim] for dim in self._dims)
        return Parameter(shape, Part(self._dims.index(self.split), self.part, None if view == shape else view))

    def arranged(self, tensor: Tensor, dims: str) -> Tensor:
        """tensor: this rank's part, as it was read. Returns it with its dimensions in this order; a dimension that it
        lacks has size 1."""
        sizes = self.sizes | ({} if self.split is None else {self.split: len(self.part)})
        present = "".join(dim for dim in dims if dim in self._dims)
        tensor = tensor.reshape([sizes[dim] for dim in self._dims]).permute([self._dims.index(dim) for dim in present])
        for place, dim in enumerate(dims):
            if dim not in self._dims:
                tensor = tensor.unsqueeze(place)
        return tensor

    @property
    def _dims(self) -> str:
        return self.pattern.replace(" ", "")


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    weight: StoredTensor
    bias: StoredTensor | None

    def arranged(self, weight: Tensor, bias: Tensor | None, dims: str, bias_dims: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with their dimensions in these orders."""
        if bias is not None:
            assert self.bias is not None
            bias = self.bias.arranged(bias, bias_dims)
        return self.weight.arranged(weight, dims), bias


def _matrices(spec: MoeSpec, shard: ExpertShard) -> dict[str, StoredMatrix]:
    """By their names after `experts.`."""
    sizes = {"e": spec.routing.num_experts, "2": 2, "i": spec.intermediate_size, "h": shard.shard.hidden_size}
    matrices = {}
    for name, pattern in STORAGES[spec.storage].items():
        parts = {"e": shard.experts.mine} if shard.intermediate is None else {"i": shard.intermediate.mine}
        if name == "down" and shard.intermediate is not None and shard.shard.exact:
            # Split by outputs, over gathered inputs.
            parts = {"h": shard.shard.hidden.mine}
        bias = None
        if spec.has_bias:
            bias = StoredTensor.of(" ".join(pattern.replace(INPUTS[name], "").split()), sizes, parts)
        matrices[name] = StoredMatrix(StoredTensor.of(pattern, sizes, parts), bias)
    return matrices


def read_experts(
    spec: MoeSpec, prefix: str, layout: WeightLayout, loader: Loader
) -> Iterator[tuple[LinearWeights, LinearWeights]]:
    """For each expert on this rank, in order: gate and up [2 * intermediate, hidden], gate first; down [hidden,
    intermediate]."""
    matrices = _matrices(spec, ExpertShard.of(spec, layout.shard))

    def read(names: list[str], dims: str, bias_dims: str) -> Iterator[LinearWeights]:
        def arranged(stored: Sequence[tuple[Tensor, Tensor | None]]) -> Iterator[DenseWeights]:
            parts = [matrices[name].arranged(*each, dims, bias_dims) for name, each in zip(names, stored, strict=True)]
            weights = torch.cat([weight for weight, _ in parts], dim=1) if len(parts) > 1 else parts[0][0]
            biases = [bias for _, bias in parts if bias is not None]
            bias = torch.cat(biases, dim=1) if biases else None
            for expert, weight in enumerate(weights):
                its_bias = None if bias is None else bias[expert].flatten()
                yield DenseWeights(weight.flatten(0, -2).contiguous(), its_bias)

        full_names = [f"{prefix}.experts.{name}" for name in names]
        return layout.scheme_of(full_names[0]).load_each(loader, full_names, arranged)

    inner = [name for name in matrices if name != "down"]
    return zip(read(inner, "e2ih", "e2i"), read(["down"], "ehi", "eh"), strict=True)
