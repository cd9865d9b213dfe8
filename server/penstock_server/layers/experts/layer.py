"""The experts of one layer: route, compute each expert's rows as one matrix, add up what a token's experts say.

A row's result does not depend on the other rows where the operators keep that promise (the native ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.kernels.activation import ACTIVATIONS
from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.experts.parameters import moe_parameters, read_experts
from penstock_server.layers.experts.routing import Router, widened
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import CLAMPED_SWIGLU, MoeSpec
from penstock_server.layers.mlp import Mlp
from penstock_server.layers.shard import Shard
from penstock_server.weights.loader import Parameter

RowFunction = Callable[[Tensor], Tensor]
"""[rows, features] → [rows, other features]"""


@dataclass(frozen=True, slots=True)
class Shared:
    """The expert that every token goes to."""

    mlp: Mlp
    gate: PackedLinear | None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → the same, wide, on all ranks."""
        output = self.mlp(x).float()
        return output if self.gate is None else output * widened(self.gate(x)).sigmoid().float()


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    spec: MoeSpec
    shard: ExpertShard
    router: Router
    gate_up: list[RowFunction]  # of this rank's experts, with the activation: → [rows, intermediate on this rank]
    down: list[PackedLinear]
    shared: Shared | None

    @staticmethod
    def parameters(spec: MoeSpec, prefix: str, hidden_size: int, shard: Shard) -> dict[str, Parameter]:
        return moe_parameters(spec, prefix, hidden_size, ExpertShard.of(spec, shard))

    @classmethod
    def load(cls, spec: MoeSpec, prefix: str, context: BuildContext) -> MixtureOfExperts:
        """Packs expert by expert; the originals are free when it returns."""
        loader, ops, shard = context.loader, context.ops, ExpertShard.of(spec, context.shard)
        gate_up: list[RowFunction] = []
        down: list[PackedLinear] = []
        # Of a sum only one summand may hold the bias.
        adds_bias = context.shard.exact or shard.intermediate is None or context.shard.group.rank == 0
        for weights in read_experts(spec, prefix, context.hidden_size, shard, loader):
            gate_up.append(_packed_gate_up(spec, ops, weights.gate_up, weights.gate_up_bias))
            down.append(ops.pack_linear(weights.down, weights.down_bias if adds_bias else None))
        shared = None
        if spec.shared is not None:
            gate = ops.pack_linear(loader.read(f"{prefix}.shared_gate.weight"), None) if spec.shared_is_gated else None
            shared = Shared(Mlp.load(spec.shared, f"{prefix}.shared", context), gate)
        return cls(spec, shard, Router.load(loader, f"{prefix}.router", spec.routing, ops), gate_up, down, shared)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        shard, by_expert = self.shard.shard, self.shard.intermediate is None
        weights, experts = self.router(x)
        results = self._results(x, experts)  # [rows, top_k, hidden, or this rank's part of it]
        if by_expert and shard.exact:
            # Every result is some rank's; zeros are added to it.
            shard.group.all_reduce(results)
        output = _weighted_sum(results, weights)
        if not shard.exact:
            output = shard.group.all_reduce(output.to(x.dtype)).float()
        elif not by_expert:
            output = shard.group.all_gather_columns(output, shard.hidden.widths())
        if self.shared is not None:
            output = output + self.shared(x)
        return output.to(x.dtype)

    def _results(self, x: Tensor, experts: Tensor) -> Tensor:
        """What the chosen experts [rows, top_k] say to each row: zero for those of other ranks."""
        intermediate, top_k, mine = self.shard.intermediate, experts.shape[1], self.shard.experts.mine
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)  # pairs of a row and an expert, by expert
        counts = chosen.bincount(minlength=self.spec.routing.num_experts).tolist()
        first = sum(counts[: mine.start])
        my_counts = counts[mine.start : mine.stop]
        pairs = order[first : first + sum(my_counts)]
        inner = _by_expert(self.gate_up, x[pairs // top_k], my_counts)
        if intermediate is not None and self.shard.shard.exact:
            inner = self.shard.shard.group.all_gather_columns(inner, intermediate.widths())
        outputs = _by_expert(self.down, inner, my_counts)
        results = x.new_zeros((chosen.shape[0], self.down[0].out_features))
        results[pairs] = outputs
        return results.unflatten(0, (-1, top_k))


def _by_expert(functions: Sequence[RowFunction], rows: Tensor, counts: list[int]) -> Tensor:
    """Each function on its rows: the first counts[0] are the first one's, and so on."""
    pieces = zip(functions, rows.split(counts), strict=True)
    # With no row at all one function says how wide nothing is.
    return torch.cat([function(piece) for function, piece in pieces if piece.shape[0]] or [functions[0](rows)])


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[rows, top_k, features], [rows, top_k] → [rows, features] float32, summed in the order of the choice."""
    total = results.new_zeros((results.shape[0], results.shape[2]), dtype=torch.float32)
    for place in range(results.shape[1]):
        total += results[:, place] * weights[:, place, None]
    return total


def _packed_gate_up(spec: MoeSpec, ops: Ops, weight: Tensor, bias: Tensor | None) -> RowFunction:
    if spec.is_swiglu:
        return ops.pack_gate_up(weight, bias)
    linear = ops.pack_linear(weight, bias)

    def apply(x: Tensor) -> Tensor:
        gate, up = widened(linear(x)).chunk(2, dim=-1)
        return _gated(spec, gate, up).to(x.dtype)

    return apply


def _gated(spec: MoeSpec, gate: Tensor, up: Tensor) -> Tensor:
    if spec.activation == CLAMPED_SWIGLU:
        # gpt-oss: gates are bounded above, and what they gate is one more than what was computed.
        gate = gate.clamp(max=spec.swiglu_limit)
        up = up.clamp(min=-spec.swiglu_limit, max=spec.swiglu_limit)
        return gate * torch.sigmoid(gate * spec.swiglu_alpha) * (up + 1)
    return ACTIVATIONS[spec.activation](gate) * up
