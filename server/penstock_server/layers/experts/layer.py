"""The experts of one layer: route, compute each expert's rows as one matrix, sum the results of a token's experts.

A row's result does not depend on the other rows if the operators guarantee that (the native ones do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from penstock_server.layers.mlp import Mlp
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
class GatedExpert:
    """Gate, up and activation of one expert, where no fused operator computes them."""

    spec: MoeSpec
    linear: Linear

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → [rows, intermediate on this rank]"""
        spec = self.spec
        gate, up = widened(self.linear(x, step)).chunk(2, dim=-1)
        if spec.activation != CLAMPED_SWIGLU:
            return (ACTIVATIONS[spec.activation](gate) * up).to(x.dtype)
        gate = gate.clamp(max=spec.swiglu_limit)
        up = up.clamp(min=-spec.swiglu_limit, max=spec.swiglu_limit)
        return (gate * torch.sigmoid(gate * spec.swiglu_alpha) * (up + 1)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    spec: MoeSpec
    shard: ExpertShard
    router: Router
    gate_up: list[RowFunction]  # one per expert on this rank: → [rows, intermediate on this rank]
    down: list[Linear]
    shared: SharedExpert | None

    @staticmethod
    def parameters(spec: MoeSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        return moe_parameters(spec, prefix, layout)

    @classmethod
    def load(cls, spec: MoeSpec, prefix: str, context: BuildContext) -> MixtureOfExperts:
        """Packs one expert after the other; the tensors that were read are freed when it returns."""
        ops, shard = context.ops, ExpertShard.of(spec, context.shard)
        gate_up: list[RowFunction] = []
        down: list[Linear] = []
        # If the ranks' results are summed, rank 0 adds the bias.
        adds_bias = context.shard.exact or shard.intermediate is None or context.shard.group.rank == 0
        for inner, outer in read_experts(spec, prefix, context.layout, context.loader):
            gate_up.append(inner.pack(ops, gated=True) if spec.is_swiglu else GatedExpert(spec, inner.pack(ops)))
            down.append((outer if adds_bias else outer.without_bias()).pack(ops))
        shared = None
        if spec.shared is not None:
            gate = context.linear(f"{prefix}.shared_gate") if spec.shared_is_gated else None
            shared = SharedExpert(Mlp.load(spec.shared, f"{prefix}.shared", context), gate)
        return cls(spec, shard, Router.load(spec.routing, f"{prefix}.router", context), gate_up, down, shared)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        shard, has_whole_experts = self.shard.shard, self.shard.intermediate is None
        weights, experts = self.router(x, step)
        results = self._results(x, experts, step)  # [rows, top_k, hidden, or this rank's part of it]
        if has_whole_experts and shard.exact:
            # One rank computed each result; the others have zeros.
            shard.group.all_reduce(results)
        output = _weighted_sum(results, weights)
        if not shard.exact:
            output = shard.group.all_reduce(output.to(x.dtype)).float()
        elif not has_whole_experts:
            output = shard.group.all_gather_columns(output, shard.hidden.widths())
        if self.shared is not None:
            output = output + self.shared(x, step)
        return output.to(x.dtype)

    def _results(self, x: Tensor, experts: Tensor, step: StepContext) -> Tensor:
        """The output of each row's experts [rows, top_k] → [rows, top_k, features]; zero for experts of other ranks."""
        intermediate, top_k, mine = self.shard.intermediate, experts.shape[1], self.shard.experts.mine
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)  # pairs of a row and an expert, by expert
        counts = chosen.bincount(minlength=self.spec.routing.num_experts).tolist()
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


def _by_expert(
    functions: Sequence[RowFunction], rows: Tensor, counts: list[int], steps: Sequence[StepContext]
) -> Tensor:
    """Applies each function to its rows: the first counts[0] rows are the first function's, and so on."""
    pieces = zip(functions, rows.split(counts), steps, strict=True)
    # Without any row, one function still determines the output's width.
    return torch.cat(
        [function(piece, step) for function, piece, step in pieces if piece.shape[0]] or [functions[0](rows, steps[0])]
    )


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[rows, top_k, features], [rows, top_k] → [rows, features] float32, summed in the order of top_k."""
    total = results.new_zeros((results.shape[0], results.shape[2]), dtype=torch.float32)
    for place in range(results.shape[1]):
        total += results[:, place] * weights[:, place, None]
    return total
