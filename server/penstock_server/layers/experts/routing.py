"""Routing: which experts process a token, and with what weights. Rows are computed independently."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.native.ops import NativeOps, NativeRouting
from penstock_server.device.ops import PackedLinear
from penstock_server.device.reference.ops import widened
from penstock_server.layers.context import BuildContext
from penstock_server.layers.experts.spec import RoutingSpec
from penstock_server.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class Router:
    linear: PackedLinear
    correction: Tensor | None  # [experts] float32
    spec: RoutingSpec
    native: NativeRouting | None = None  # the same in a native kernel, where there is one
    site: int | None = None  # adapter site

    @classmethod
    def load(cls, spec: RoutingSpec, prefix: str, context: BuildContext) -> Router:
        correction = None
        if spec.has_correction:
            correction = context.loader.read(f"{prefix}.correction")
        site = None
        if spec.is_wide:
            weight, bias = context.weights(prefix).dense()
            assert bias is None
            linear = context.ops.pack_wide(weight)
        else:
            linear, site = context.linear(prefix), context.site(prefix)
        native = context.ops.routing(spec, correction) if isinstance(context.ops, NativeOps) else None
        return cls(linear, correction, spec, native, site)

    def logits(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → [rows, experts]"""
        logits = self.linear(x)
        step.add_adapters(self.site, x, logits)
        return logits

    def __call__(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """x [rows, hidden] → weights [rows, top_k] float32 and experts [rows, top_k] int64, in any order."""
        logits = self.logits(x, step)
        if self.native is not None:
            return self.native(logits)
        return choose_experts(logits.float(), self.correction, self.spec)


def choose_experts(logits: Tensor, correction: Tensor | None, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """logits [rows, experts] float32 → weights and experts [rows, top_k]"""
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, spec)
    if spec.scoring == "softmax-chosen":
        chosen, experts = logits.topk(spec.top_k, dim=-1)
        return chosen.softmax(dim=-1) * spec.scale, experts
    scores = logits.softmax(dim=-1) if spec.scoring == "softmax" else widened(logits).sigmoid().float()
    ranked = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        ranked = _best_groups_only(ranked, spec)
    experts = ranked.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if spec.norm_power is not None:
        weights = weights / (weights.norm(p=spec.norm_power, dim=-1, keepdim=True) + spec.norm_epsilon)
    return weights * spec.scale, experts


def _best_groups_only(scores: Tensor, spec: RoutingSpec) -> Tensor:
    """The scores [rows, experts], with -infinity outside of the best groups."""
    groups = scores.unflatten(-1, (spec.num_groups, -1))  # [rows, groups, experts of a group]
    num_summed = 1 if spec.group_score == "best" else 2
    group_scores = groups.topk(num_summed, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(spec.top_groups, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out[..., None], float("-inf")).flatten(-2)


def _sparsemixer(logits: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """SparseMixer for inference: choose the best expert, exclude it, repeat. An expert's weight is its softmax among
    the experts close to it."""
    remaining, weights, experts = logits, [], []
    for _ in range(spec.top_k):
        best, expert = remaining.max(dim=-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        close = remaining.masked_fill(distance > 2 * spec.jitter, float("-inf"))
        weights.append(close.softmax(dim=-1).gather(-1, expert))
        experts.append(expert)
        remaining = remaining.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, dim=-1) * spec.scale, torch.cat(experts, dim=-1)
