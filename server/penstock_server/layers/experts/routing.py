"""Which experts a token goes to, and with which weights. Rows do not see each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.layers.experts.spec import RoutingSpec
from penstock_server.weights.loader import Loader


def widened(x: Tensor) -> Tensor:
    """float64 on a CPU, float32 elsewhere.

    On a CPU torch computes exponentials at the ends of its vector loops differently, and matrix products by their
    shapes, so that a number would depend on its place in the batch; in float64 the difference does not reach a result
    that is rounded to float32 or less.
    """
    return x.double() if x.device.type == "cpu" else x.float()


@dataclass(frozen=True, slots=True)
class WideLinear:
    """A projection whose results are not rounded to the model's type. [rows, in_features] → float32."""

    weight: Tensor  # as `widened` gives it
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


@dataclass(frozen=True, slots=True)
class Router:
    linear: PackedLinear | WideLinear
    correction: Tensor | None  # [experts] float32
    spec: RoutingSpec

    @classmethod
    def load(cls, loader: Loader, prefix: str, spec: RoutingSpec, ops: Ops) -> Router:
        weight, bias = loader.read(f"{prefix}.weight"), loader.read_if_there(f"{prefix}.bias")
        correction = loader.read(f"{prefix}.correction", dtype=torch.float32) if spec.has_correction else None
        if spec.is_wide:
            return cls(WideLinear(widened(weight), None if bias is None else widened(bias)), correction, spec)
        return cls(ops.pack_linear(weight, bias), correction, spec)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, hidden] → weights [rows, top_k] float32 and experts [rows, top_k] int64, in an order of the row's
        own."""
        return choose_experts(self.linear(x).float(), self.correction, self.spec)


def choose_experts(logits: Tensor, correction: Tensor | None, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """logits [rows, experts] float32 → weights and experts [rows, top_k]."""
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, spec)
    if spec.scoring == "softmax-chosen":
        chosen, experts = logits.topk(spec.top_k, dim=-1)
        return chosen.softmax(dim=-1) * spec.scale, experts
    scores = logits.softmax(dim=-1) if spec.scoring == "softmax" else widened(logits).sigmoid().float()
    ranked = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        ranked = _only_best_groups(ranked, spec)
    experts = ranked.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if spec.norm_power is not None:
        weights = weights / (weights.norm(p=spec.norm_power, dim=-1, keepdim=True) + spec.norm_epsilon)
    return weights * spec.scale, experts


def _only_best_groups(scores: Tensor, spec: RoutingSpec) -> Tensor:
    """Scores with those outside of the best groups at -infinity."""
    groups = scores.unflatten(-1, (spec.num_groups, -1))  # [rows, groups, experts of a group]
    num_summed = 1 if spec.group_score == "best" else 2
    group_scores = groups.topk(num_summed, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(spec.top_groups, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out[..., None], float("-inf")).flatten(-2)


def _sparsemixer(logits: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """The form for inference: the best expert again and again, each time without those chosen before. Its weight is its
    softmax among the experts close to it."""
    left, weights, experts = logits, [], []
    for _ in range(spec.top_k):
        best, expert = left.max(dim=-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        close = left.masked_fill(distance > 2 * spec.jitter, float("-inf"))
        weights.append(close.softmax(dim=-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, dim=-1) * spec.scale, torch.cat(experts, dim=-1)
