"""Experts on CUDA devices: the matrices of all experts in one launch each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.kernels.ops import Elementwise
from penstock_server.kernels.triton_grouped import GroupedLinear, GroupedQuantized, assign, weighted_sum
from penstock_server.kernels.triton_quantized import Segment
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.linear import LinearWeights
from penstock_server.layers.quantized import QuantizedWeights
from penstock_server.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Implements `Experts`."""

    shard: ExpertShard
    num_experts: int  # on all ranks
    gate_up: GroupedLinear | GroupedQuantized
    activation: Elementwise  # [pairs, 2 * intermediate] → [pairs, intermediate]
    down: GroupedLinear | GroupedQuantized

    @classmethod
    def of(
        cls,
        shard: ExpertShard,
        num_experts: int,
        activation: Elementwise,
        weights: Sequence[tuple[LinearWeights, LinearWeights]],
    ) -> GroupedExperts:
        """weights: gate and up, and down, of each expert on this rank."""
        gate_up, down = (_grouped(part) for part in zip(*weights, strict=True))
        return cls(shard, num_experts, gate_up, activation, down)

    def results(self, x: Tensor, experts: Tensor, step: StepContext) -> Tensor:
        shard, top_k = self.shard, experts.shape[1]
        assignment = assign(experts, shard.experts.mine, self.num_experts)
        inner = self.activation(self.gate_up(x, assignment, top_k))
        if shard.intermediate is not None and shard.shard.exact:
            inner = shard.shard.group.all_gather_columns(inner, shard.intermediate.widths())
        return self.down(inner, assignment, 1).unflatten(0, (-1, top_k))

    def weighted_sum(self, results: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(results, weights)


def _grouped(weights: Sequence[LinearWeights]) -> GroupedLinear | GroupedQuantized:
    quantized = [one for one in weights if isinstance(one, QuantizedWeights) and one.has_one_order]
    formats = {matrix.format for one in quantized for matrix in one.matrices}
    if len(quantized) == len(weights) and len(formats) == 1:
        return _grouped_quantized(quantized)
    dense = [one.dense() for one in weights]
    biases = [bias for _, bias in dense if bias is not None]
    return GroupedLinear(torch.stack([weight for weight, _ in dense]), torch.stack(biases) if biases else None)


def _grouped_quantized(weights: Sequence[QuantizedWeights]) -> GroupedQuantized:
    """The weights have one format."""
    device, biases = weights[0].device, [one.bias for one in weights if one.bias is not None]
    orders = [one.matrices[0].order for one in weights]
    columns_order = None
    if any(order is not None for order in orders):
        in_order = torch.arange(weights[0].matrices[0].shape[1])
        columns_order = torch.stack([in_order if order is None else order for order in orders]).to(device, torch.int32)
    segment = Segment.pack([matrix for one in weights for matrix in one.matrices], 0, None, device, gated=False)
    return GroupedQuantized(segment, len(weights), torch.stack(biases) if biases else None, columns_order)
