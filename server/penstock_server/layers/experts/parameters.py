"""The parameters of a mixture of experts: how they are stored, and which part of each a rank reads.

Our names are the same for every storage; the dimensions of `STORAGES` say the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import STORAGES, MoeSpec
from penstock_server.layers.mlp import Mlp
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter

# The dimension that a matrix takes its inputs in.
INPUTS = {"gate": "h", "up": "h", "gate_up": "h", "down": "i"}


def moe_parameters(spec: MoeSpec, prefix: str, hidden_size: int, shard: ExpertShard) -> dict[str, Parameter]:
    """`prefix.router.{weight,bias,correction}`, `prefix.experts.{gate,up,gate_up,down}.{weight,bias}`,
    `prefix.shared.{gate,up,down}.weight`, `prefix.shared_gate.weight`."""
    num_experts = spec.routing.num_experts
    table = {f"{prefix}.router.weight": Parameter((num_experts, hidden_size))}
    if spec.routing.has_bias:
        table[f"{prefix}.router.bias"] = Parameter((num_experts,))
    if spec.routing.has_correction:
        table[f"{prefix}.router.correction"] = Parameter((num_experts,))
    for name, matrix in _matrices(spec, hidden_size, shard).items():
        table[f"{prefix}.experts.{name}"] = matrix.parameter()
    if spec.shared is not None:
        table |= Mlp.parameters(spec.shared, f"{prefix}.shared", hidden_size, shard.shard)
    if spec.shared_is_gated:
        table[f"{prefix}.shared_gate.weight"] = Parameter((1, hidden_size))
    return table


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix or bias of one expert or of all: its dimensions by their letters, their sizes, and the part read."""

    pattern: str  # as in STORAGES
    sizes: dict[str, int]
    split: str | None = None  # the dimension of which a rank has a part
    part: range = range(0)

    def parameter(self) -> Parameter:
        shape = tuple(math.prod(self.sizes[dim] for dim in folded) for folded in self.pattern.split())
        if self.split is None:
            return Parameter(shape)
        view = tuple(self.sizes[dim] for dim in self._dims)
        return Parameter(shape, Part(self._dims.index(self.split), self.part, None if view == shape else view))

    def arranged(self, tensor: Tensor, dims: str) -> Tensor:
        """What was read of the parameter, its dimensions in this order; one that it lacks has size 1."""
        sizes = self.sizes | ({} if self.split is None else {self.split: len(self.part)})
        there = "".join(dim for dim in dims if dim in self._dims)
        tensor = tensor.reshape([sizes[dim] for dim in self._dims]).permute([self._dims.index(dim) for dim in there])
        for place, dim in enumerate(dims):
            if dim not in self._dims:
                tensor = tensor.unsqueeze(place)
        return tensor

    @property
    def _dims(self) -> str:
        return self.pattern.replace(" ", "")


def _matrices(spec: MoeSpec, hidden_size: int, shard: ExpertShard) -> dict[str, StoredMatrix]:
    """By name behind `experts.`."""
    sizes = {"e": spec.routing.num_experts, "2": 2, "i": spec.intermediate_size, "h": hidden_size}
    mine = {"e": shard.experts.mine} if shard.intermediate is None else {"i": shard.intermediate.mine}
    matrices = {}
    for name, pattern in STORAGES[spec.storage].items():
        patterns = {f"{name}.weight": pattern}
        if spec.has_bias:
            patterns[f"{name}.bias"] = " ".join(pattern.replace(INPUTS[name], "").split())
        for full_name, dims in patterns.items():
            own = mine
            if name == "down" and shard.intermediate is not None and shard.shard.exact:
                # Split by its results, over gathered inputs.
                own = {"h": shard.shard.hidden.mine}
            split = next((dim for dim in own if dim in dims), None)
            matrices[full_name] = StoredMatrix(dims, sizes, split, own[split] if split else range(0))
    return matrices


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """What this rank holds of one expert. Gate rows first."""

    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


def read_experts(
    spec: MoeSpec, prefix: str, hidden_size: int, shard: ExpertShard, loader: Loader
) -> Iterator[ExpertWeights]:
    """This rank's experts in order."""
    matrices, prefix = _matrices(spec, hidden_size, shard), f"{prefix}.experts"
    gate_up = _read_gate_up(loader, prefix, matrices, "weight", "e2ih")
    down = _read(loader, prefix, matrices, "down.weight", "ehi")
    gate_up_bias = down_bias = None
    if "down.bias" in matrices:
        gate_up_bias = _read_gate_up(loader, prefix, matrices, "bias", "e2i")
        down_bias = _read(loader, prefix, matrices, "down.bias", "eh")
    for place in range(down.shape[0]):
        yield ExpertWeights(
            gate_up[place].flatten(0, 1),
            None if gate_up_bias is None else gate_up_bias[place].flatten(),
            down[place].contiguous(),
            None if down_bias is None else down_bias[place].contiguous(),
        )


def _read_gate_up(loader: Loader, prefix: str, matrices: dict[str, StoredMatrix], suffix: str, dims: str) -> Tensor:
    if f"gate_up.{suffix}" in matrices:
        return _read(loader, prefix, matrices, f"gate_up.{suffix}", dims)
    return torch.cat([_read(loader, prefix, matrices, f"{half}.{suffix}", dims) for half in ("gate", "up")], dim=1)


def _read(loader: Loader, prefix: str, matrices: dict[str, StoredMatrix], name: str, dims: str) -> Tensor:
    return matrices[name].arranged(loader.read(f"{prefix}.{name}"), dims)
