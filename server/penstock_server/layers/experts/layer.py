"""The experts of one layer: route, compute each expert's rows as one matrix, sum the results of a token's experts.

A row's result does not depend on the other rows if the operators guarantee that (the native ones do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from penstock_server.device.activation import ACTIVATIONS
from penstock_server.device.native.ops import NativeOps
from penstock_server.device.ops import Elementwise, Ops, PackedLinear
from penstock_server.device.reference.ops import widened
from penstock_server.layers import operation
from penstock_server.layers.context import BuildContext
from penstock_server.layers.experts.parameters import moe_parameters, read_experts
from penstock_server.layers.experts.routing import Router
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.site import expert_sites
from penstock_server.layers.experts.spec import CLAMPED_SWIGLU, MoeSpec
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.mlp import ActivatedLinear, Mlp
from penstock_server.layers.operation import Program, Register
from penstock_server.layers.step import StepContext
from penstock_server.weights.loader import Parameter

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """[rows, 2 * intermediate], gate first, or ungated [rows, intermediate] → [rows, intermediate]: of one expert,
    where no operator computes it."""

    spec: MoeSpec

    def __call__(self, x: Tensor) -> Tensor:
        spec = self.spec
        if not spec.is_gated:
            return ACTIVATIONS[spec.activation](widened(x)).to(x.dtype)
        gate, up = widened(x).chunk(2, dim=-1)
        if spec.activation != CLAMPED_SWIGLU:
            return (ACTIVATIONS[spec.activation](gate) * up).to(x.dtype)
        gate = gate.clamp(max=spec.swiglu_limit)
        up = up.clamp(min=-spec.swiglu_limit, max=spec.swiglu_limit)
        return (gate * torch.sigmoid(gate * spec.swiglu_alpha) * (up + 1)).to(x.dtype)


class Experts(Protocol[Choice]):
    """The experts on this rank, and the choice of a row's."""

    def choose(self, x: Tensor, step: StepContext) -> Choice:
        """x [rows, hidden] → which experts process each row, and with what weights."""
        ...

    def results(self, x: Tensor, choice: Choice, step: StepContext) -> Tensor:
        """[rows, top_k, features]: the output of each row's experts. The features are the hidden dimension, or this
        rank's part of it. Those of other ranks' experts are zero if the ranks' results are summed, otherwise
        anything."""
        ...

    def weighted_sum(self, results: Tensor, choice: Choice, shared: Tensor | None) -> Tensor:
        """[rows, top_k, features] → [rows, features], summed in the order of top_k, then the shared expert's result
        [rows, features]. Called once for each choice."""
        ...


@dataclass(frozen=True, slots=True)
class ListedChoice:
    weights: Tensor  # [rows, top_k] float32
    experts: Tensor  # [rows, top_k] int64
    shared_weight: Tensor | None  # [rows, 1] float32: of the shared expert


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """One expert after the other. Implements `Experts`."""

    shard: ExpertShard
    router: Router
    shared_gate: PackedLinear | None
    gate_up: list[PackedLinear | ActivatedLinear]  # one per expert on this rank: → [rows, intermediate on this rank]
    down: list[PackedLinear]
    first_site: int | None = None  # first adapter site, see `expert_sites`
    gate: Elementwise | None = None  # see `Mlp`

    def choose(self, x: Tensor, step: StepContext) -> ListedChoice:
        shared = None if self.shared_gate is None else widened(self.shared_gate(x)).sigmoid().float()
        return ListedChoice(*self.router(x, step), shared)

    def results(self, x: Tensor, choice: ListedChoice, step: StepContext) -> Tensor:
        intermediate, mine, top_k = self.shard.intermediate, self.shard.experts.mine, choice.experts.shape[1]
        chosen = choice.experts.flatten()
        order = chosen.argsort(stable=True)  # pairs of a row and an expert, by expert
        counts = chosen.bincount(minlength=self.router.spec.num_experts).tolist()
        first = sum(counts[: mine.start])
        my_counts = counts[mine.start : mine.stop]
        pairs = order[first : first + sum(my_counts)]
        rows = pairs // top_k
        scales = choice.weights.flatten()[pairs, None].to(x.dtype) if self.router.spec.scales_inputs else None
        # PERF: the inputs are not kept while the experts' outputs are made.
        inner = _by_expert(self.gate_up, x[rows] if scales is None else x[rows] * scales, my_counts)
        if intermediate is not None and self.shard.shard.exact:
            inner = self.shard.shard.group.all_gather_columns(inner, intermediate.widths())
        outputs = _by_expert(self.down, inner, my_counts)
        results = x.new_zeros((chosen.shape[0], self.down[0].out_features))
        results[pairs] = outputs
        return results.unflatten(0, (-1, top_k))

    def weighted_sum(self, results: Tensor, choice: ListedChoice, shared: Tensor | None) -> Tensor:
        total = results.new_zeros((results.shape[0], results.shape[2]), dtype=torch.float32)
        scales_inputs = self.router.spec.scales_inputs
        for place in range(results.shape[1]):
            total += results[:, place] if scales_inputs else results[:, place] * choice.weights[:, place, None]
        if shared is not None:
            total += shared if choice.shared_weight is None else shared.float() * choice.shared_weight
        return total.to(results.dtype)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    spec: MoeSpec
    shard: ExpertShard
    experts: Experts[Any]
    shared: Mlp | None  # the expert that processes every token

    @staticmethod
    def parameters(spec: MoeSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        return moe_parameters(spec, prefix, layout)

    @classmethod
    def load(cls, spec: MoeSpec, prefix: str, context: BuildContext) -> MixtureOfExperts:
        shard = ExpertShard.of(spec, context.shard)
        experts = _load_experts(spec, shard, prefix, context)
        return cls(
            spec, shard, experts, None if spec.shared is None else Mlp.load(spec.shared, f"{prefix}.shared", context)
        )

    def __call__(self, x: Tensor, shared: Tensor | None, step: StepContext) -> Tensor:
        """[rows, hidden], and the shared expert's output if there is one → the same, on all ranks."""
        shard, has_parts = self.shard.shard, self.shard.intermediate is not None
        choice = self.experts.choose(x, step)
        results = self.experts.results(x, choice, step)
        if self.shard.sums_results:
            # One rank computed each result; the others have zeros.
            shard.group.all_reduce(results)
        if not shard.exact:
            # Rank 0 adds the shared expert's result to the sum.
            output = self.experts.weighted_sum(results, choice, shared if shard.group.rank == 0 else None)
            return shard.group.all_reduce(output)
        if not has_parts:
            return self.experts.weighted_sum(results, choice, shared)
        mine = None if shared is None else shared[:, shard.hidden.mine.start : shard.hidden.mine.stop]
        output = self.experts.weighted_sum(results, choice, mine)
        return shard.group.all_gather_columns(output, shard.hidden.widths())

    def append_to(self, program: Program, source: Register, target: Register) -> None:
        """Appends [rows, hidden] → the same, on all ranks."""
        if self.shared is not None:
            self.shared.append_to(program, source, "shared")
        program.append(operation.Experts(source, target, self))


def _activation(spec: MoeSpec, ops: Ops) -> Elementwise:
    """Activation of gate and up, for operators that do not compute both."""
    if not isinstance(ops, NativeOps):
        gated = ops.groups_experts and spec.is_gated and spec.activation != CLAMPED_SWIGLU
        return ops.gated(ACTIVATIONS[spec.activation]) if gated else ExpertActivation(spec)
    if spec.activation == CLAMPED_SWIGLU:
        return ops.clamped_swiglu(spec.swiglu_alpha, spec.swiglu_limit)
    wrap = ops.gated if spec.is_gated else ops.elementwise
    return wrap(ACTIVATIONS[spec.activation])


def _load_experts(spec: MoeSpec, shard: ExpertShard, prefix: str, context: BuildContext) -> Experts[Any]:
    """Packs one expert after the other where they are apart; the tensors that were read are freed when it returns."""
    ops = context.ops
    # If the ranks' results are summed, rank 0 adds the bias.
    adds_bias = context.shard.exact or shard.intermediate is None or context.shard.group.rank == 0
    weights = (
        (inner, outer if adds_bias else outer.without_bias())
        for inner, outer in read_experts(spec, prefix, context.layout, context.loader)
    )
    router = Router.load(spec.routing, f"{prefix}.router", context)
    shared_gate = context.weights(f"{prefix}.shared_gate") if spec.shared_is_gated else None
    sites = context.adapter_sites
    site = None if sites is None or not spec.is_gated else expert_sites(spec, shard, prefix, sites)
    if ops.groups_experts and spec.is_gated:
        from penstock_server.layers.experts.triton_experts import GroupedExperts

        gate_row = None if shared_gate is None else shared_gate.dense()[0][0]
        sums = None if sites is None or site is None else sites.sums_of_experts(site)
        return GroupedExperts.of(spec, shard, router, gate_row, list(weights), sums, _activation(spec, ops))
    gate = ops.gated(ACTIVATIONS["silu"]) if site is not None and spec.is_swiglu else None
    activation = _activation(spec, ops)
    gate_up: list[PackedLinear | ActivatedLinear] = []
    down: list[PackedLinear] = []
    for inner, outer in weights:
        gate_up.append(inner.pack(ops, gated=True) if spec.is_swiglu else ActivatedLinear(inner.pack(ops), activation))
        down.append(outer.pack(ops))
    return ListedExperts(
        shard, router, None if shared_gate is None else shared_gate.pack(ops), gate_up, down, site, gate
    )


def _by_expert(functions: Sequence[PackedLinear | ActivatedLinear], rows: Tensor, counts: list[int]) -> Tensor:
    """Applies each function to its rows: the first counts[0] rows are the first function's, and so on."""
    pieces = zip(functions, rows.split(counts), strict=True)
    # Without any row, one function still determines the output's width.
    return torch.cat([function(piece) for function, piece in pieces if piece.shape[0]] or [functions[0](rows)])
