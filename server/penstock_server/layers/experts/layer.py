"""The experts of one layer: route, compute each expert's rows as one matrix, sum the results of a token's experts.

A row's result does not depend on the other rows if the operators guarantee that (the native ones do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_server.kernels.activation import ACTIVATIONS
from penstock_server.layers.context import BuildContext
from penstock_server.layers.experts.parameters import moe_parameters, read_experts
from penstock_server.layers.experts.routing import Router, widened
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import CLAMPED_SWIGLU, MoeSpec
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.linear import Linear
from penstock_server.layers.mlp import ActivatedLinear, Mlp
from penstock_server.layers.step import StepContext
from penstock_server.weights.loader import Parameter

RowFunction = Callable[[Tensor, StepContext], Tensor]
"""[rows, in] → [rows, out]"""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that processes every token."""

    mlp: Mlp
    gate: Linear | None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → [rows, hidden] float32 or wider, on all ranks."""
        output = self.mlp(x, step).float()
        return output if self.gate is None else output * widened(self.gate(x, step)).sigmoid().float()


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """[rows, 2 * intermediate], gate first → [rows, intermediate]: of one expert, where no operator computes it."""

    spec: MoeSpec

    def __call__(self, x: Tensor) -> Tensor:
        spec = self.spec
        gate, up = widened(x).chunk(2, dim=-1)
        if spec.activation != CLAMPED_SWIGLU:
            return (ACTIVATIONS[spec.activation](gate) * up).to(x.dtype)
        gate = gate.clamp(max=spec.swiglu_limit)
        up = up.clamp(min=-spec.swiglu_limit, max=spec.swiglu_limit)
        return (gate * torch.sigmoid(gate * spec.swiglu_alpha) * (up + 1)).to(x.dtype)


class Experts(Protocol):
    """The experts on this rank."""

    def results(self, x: Tensor, experts: Tensor, step: StepContext) -> Tensor:
        """x [rows, hidden], experts [rows, top_k] → [rows, top_k, features]: the output of each row's experts; zero for
        experts of other ranks. The features are the hidden dimension, or this rank's part of it."""
        ...

    def weighted_sum(self, results: Tensor, weights: Tensor) -> Tensor:
        """[rows, top_k, features], [rows, top_k] → [rows, features] float32, summed in the order of top_k."""
        ...


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """One expert after the other. Implements `Experts`."""

    shard: ExpertShard
    num_experts: int  # on all ranks
    gate_up: list[RowFunction]  # one per expert on this rank: → [rows, intermediate on this rank]
    down: list[Linear]

    def results(self, x: Tensor, experts: Tensor, step: StepContext) -> Tensor:
        intermediate, top_k, mine = self.shard.intermediate, experts.shape[1], self.shard.experts.mine
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)  # pairs of a row and an expert, by expert
        counts = chosen.bincount(minlength=self.num_experts).tolist()
        first = sum(counts[: mine.start])
        my_counts = counts[mine.start : mine.stop]
        pairs = order[first : first + sum(my_counts)]
        rows = pairs // top_k
        steps = [step.select(part) if part.shape[0] else step for part in rows.split(my_counts)]
        inner = _by_expert(self.gate_up, x[rows], my_counts, steps)
        if intermediate is not None and self.shard.shard.exact:
            inner = self.shard.shard.group.all_gather_columns(inner, intermediate.widths())
        outputs = _by_expert(self.down, inner, my_counts, steps)
        results = x.new_zeros((chosen.shape[0], self.down[0].out_features))
        results[pairs] = outputs
        return results.unflatten(0, (-1, top_k))

    def weighted_sum(self, results: Tensor, weights: Tensor) -> Tensor:
        total = results.new_zeros((results.shape[0], results.shape[2]), dtype=torch.float32)
        for place in range(results.shape[1]):
            total += results[:, place] * weights[:, place, None]
        return total


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    spec: MoeSpec
    shard: ExpertShard
    router: Router
    experts: Experts
    shared: SharedExpert | None

    @staticmethod
    def parameters(spec: MoeSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        return moe_parameters(spec, prefix, layout)

    @classmethod
    def load(cls, spec: MoeSpec, prefix: str, context: BuildContext) -> MixtureOfExperts:
        shard = ExpertShard.of(spec, context.shard)
        experts = _load_experts(spec, shard, prefix, context)
        shared = None
        if spec.shared is not None:
            gate = context.linear(f"{prefix}.shared_gate") if spec.shared_is_gated else None
            shared = SharedExpert(Mlp.load(spec.shared, f"{prefix}.shared", context), gate)
        return cls(spec, shard, Router.load(spec.routing, f"{prefix}.router", context), experts, shared)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        shard, has_whole_experts = self.shard.shard, self.shard.intermediate is None
        weights, experts = self.router(x, step)
        results = self.experts.results(x, experts, step)
        if has_whole_experts and shard.exact:
            # One rank computed each result; the others have zeros.
            shard.group.all_reduce(results)
        output = self.experts.weighted_sum(results, weights)
        if not shard.exact:
            output = shard.group.all_reduce(output.to(x.dtype)).float()
        elif not has_whole_experts:
            output = shard.group.all_gather_columns(output, shard.hidden.widths())
        if self.shared is not None:
            output = output + self.shared(x, step)
        return output.to(x.dtype)


def _load_experts(spec: MoeSpec, shard: ExpertShard, prefix: str, context: BuildContext) -> Experts:
    """Packs one expert after the other where they are apart; the tensors that were read are freed when it returns."""
    ops, num_experts = context.ops, spec.routing.num_experts
    # If the ranks' results are summed, rank 0 adds the bias.
    adds_bias = context.shard.exact or shard.intermediate is None or context.shard.group.rank == 0
    weights = (
        (inner, outer if adds_bias else outer.without_bias())
        for inner, outer in read_experts(spec, prefix, context.layout, context.loader)
    )
    activation = ExpertActivation(spec)
    if ops.groups_experts:
        from penstock_server.layers.experts.triton_experts import GroupedExperts

        gate = ops.gated(ACTIVATIONS[spec.activation]) if spec.is_swiglu else activation
        return GroupedExperts.of(shard, num_experts, gate, list(weights))
    gate_up: list[RowFunction] = []
    down: list[Linear] = []
    for inner, outer in weights:
        gate_up.append(inner.pack(ops, gated=True) if spec.is_swiglu else ActivatedLinear(inner.pack(ops), activation))
        down.append(outer.pack(ops))
    return ListedExperts(shard, num_experts, gate_up, down)


def _by_expert(
    functions: Sequence[RowFunction], rows: Tensor, counts: list[int], steps: Sequence[StepContext]
) -> Tensor:
    """Applies each function to its rows: the first counts[0] rows are the first function's, and so on."""
    pieces = zip(functions, rows.split(counts), steps, strict=True)
    # Without any row, one function still determines the output's width.
    return torch.cat(
        [function(piece, step) for function, piece, step in pieces if piece.shape[0]] or [functions[0](rows, steps[0])]
    )
