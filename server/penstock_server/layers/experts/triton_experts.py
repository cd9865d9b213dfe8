"""Experts on CUDA devices: one launch chooses them, and one each applies a matrix of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock_server.device.activation import ACTIVATIONS
from penstock_server.device.ops import Elementwise
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.grouped import Assignment, Gate, GroupedLinear, GroupedQuantized, weighted_sum
from penstock_server.device.triton.low_rank import ExpertPairs, LowRankSum
from penstock_server.device.triton.ops import KERNEL_ACTIVATIONS, power_of_two
from penstock_server.device.triton.quantized import Segment
from penstock_server.device.triton.routing_kernel import route_kernel
from penstock_server.errors import ConfigError
from penstock_server.layers.experts.routing import Router
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import CLAMPED_SWIGLU, MoeSpec
from penstock_server.layers.linear import LinearWeights
from penstock_server.layers.quantized import QuantizedWeights
from penstock_server.layers.step import StepContext

_WARP = 32
_HIDDEN_WIDTH = 1024  # elements of a row that a program holds


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Implements `Experts`.

    INVARIANT: `counts` is zero between steps, because `weighted_sum` ends what `choose` began. So it costs no launch to
    set it to zero.
    """

    shard: ExpertShard
    router: Router
    shared_gate: Tensor | None  # [hidden]
    counts: Tensor  # [experts on this rank] int32
    gate_up: GroupedLinear | GroupedQuantized
    down: GroupedLinear | GroupedQuantized
    # What adapters add to both, and then the activation of gate and up, which adapters change before it.
    sums: tuple[LowRankSum, LowRankSum] | None = None
    activation: Elementwise | None = None

    @classmethod
    def of(
        cls,
        spec: MoeSpec,
        shard: ExpertShard,
        router: Router,
        shared_gate: Tensor | None,
        weights: Sequence[tuple[LinearWeights, LinearWeights]],
        sums: tuple[LowRankSum, LowRankSum] | None,
        activation: Elementwise,
    ) -> GroupedExperts:
        """weights: gate and up, and down, of each expert on this rank. sums: what adapters add to both; None: nothing.
        activation: of gate and up, [rows, 2 * intermediate] → [rows, intermediate]."""
        gate_up, down = (_grouped(part) for part in zip(*weights, strict=True))
        counts = torch.zeros(len(weights), dtype=torch.int32, device=_device(down))
        if sums is not None:
            return cls(shard, router, shared_gate, counts, gate_up, down, sums, activation)
        return cls(shard, router, shared_gate, counts, replace(gate_up, gate=_gate(spec)), down)

    def choose(self, x: Tensor, step: StepContext) -> Assignment:
        logits = self.router.logits(x, step).contiguous()
        return assign(logits, self.router, self.shard.experts.mine, self.counts, x, self.shared_gate)

    def results(self, x: Tensor, choice: Assignment, step: StepContext) -> Tensor:
        shard, num_pairs = self.shard, choice.num_pairs
        inner = x.new_empty((num_pairs, self.gate_up.out_features))
        if self.router.spec.scales_inputs:
            x = (x[:, None] * choice.weights.to(x.dtype)[..., None]).flatten(0, 1)  # a row for each pair
        self.gate_up(x, choice, inner)
        pairs = None
        if self.sums is not None and step.adapters is not None:
            mine, adapters = shard.experts.mine, step.adapters
            assert adapters.tables is not None, "only GPUs interpret programs with adapters"
            pairs = ExpertPairs.of(choice.experts, mine, adapters.of_tokens, adapters.tables)
            self.sums[0].add_of_experts(x, inner, pairs)
        if self.activation is not None:
            inner = self.activation(inner)
        if shard.intermediate is not None and shard.shard.exact:
            inner = shard.shard.group.all_gather_columns(inner, shard.intermediate.widths())
        # If the ranks' results are added up, the results of other ranks' experts are zero.
        make = x.new_zeros if shard.sums_results else x.new_empty
        results = make((num_pairs, self.down.out_features))
        self.down(inner, choice, results)
        if self.sums is not None and pairs is not None:
            self.sums[1].add_of_experts(inner, results, pairs)
        return results.unflatten(0, tuple(choice.experts.shape))

    def weighted_sum(self, results: Tensor, choice: Assignment, shared: Tensor | None) -> Tensor:
        experts = range(choice.num_experts) if self.shard.sums_results else self.shard.experts.mine
        if self.router.spec.scales_inputs:
            choice = replace(choice, weights=torch.ones_like(choice.weights))
        return weighted_sum(results.flatten(0, 1), choice, shared, experts)


def assign(
    logits: Tensor, router: Router, mine: range, counts: Tensor, x: Tensor, shared_gate: Tensor | None
) -> Assignment:
    """logits [rows, experts], of which this rank has `mine`; counts [mine] int32, which are zero; x [rows, hidden];
    shared_gate [hidden]: of the shared expert, if it has one."""
    spec, device, num_rows = router.spec, logits.device, logits.shape[0]
    num_weights = spec.top_k + (shared_gate is not None)
    weights = torch.empty((num_rows, num_weights), dtype=torch.float32, device=device)
    experts = torch.empty((num_rows, spec.top_k), dtype=torch.int32, device=device)
    pairs = torch.empty((len(mine), num_rows), dtype=torch.int32, device=device)
    triton_device.launch(
        route_kernel,
        (num_rows, 1),
        weights=weights,
        experts=experts,
        counts=counts,
        pairs=pairs,
        logits=logits,
        correction=router.correction,
        x=x,
        gate=shared_gate,
        num_rows=num_rows,
        EXPERTS=spec.num_experts,
        FIRST=mine.start,
        MINE=len(mine),
        TOP_K=spec.top_k,
        NUM_WEIGHTS=num_weights,
        SCORING=spec.scoring,
        NORM_POWER=spec.norm_power or 0.0,
        NORM_EPSILON=spec.norm_epsilon,
        SCALE=spec.scale,
        GROUPS=spec.num_groups,
        TOP_GROUPS=spec.top_groups,
        SUMS_TWO=spec.group_score == "best-two",
        JITTER=spec.jitter,
        HIDDEN=x.shape[1],
        GROUP_WIDTH=power_of_two(spec.num_groups),
        MEMBER_WIDTH=power_of_two(spec.num_experts // spec.num_groups),
        CHOICE_WIDTH=max(_WARP, power_of_two(spec.top_k)),
        HIDDEN_WIDTH=_HIDDEN_WIDTH,
        num_warps=1,
    )
    return Assignment(weights, experts, counts, pairs, spec.num_experts)


def _gate(spec: MoeSpec) -> Gate:
    if spec.activation == CLAMPED_SWIGLU:
        return Gate(CLAMPED_SWIGLU, spec.swiglu_alpha, spec.swiglu_limit)
    name = KERNEL_ACTIVATIONS.get(ACTIVATIONS[spec.activation])
    if name is None:
        raise ConfigError(f"experts with the activation {spec.activation!r} are not supported on GPUs")
    return Gate(name)


def _device(layer: GroupedLinear | GroupedQuantized) -> torch.device:
    return layer.weight.device if isinstance(layer, GroupedLinear) else layer.segment.weight.words.device


def _grouped(weights: Sequence[LinearWeights]) -> GroupedLinear | GroupedQuantized:
    quantized = [one for one in weights if isinstance(one, QuantizedWeights)]
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
