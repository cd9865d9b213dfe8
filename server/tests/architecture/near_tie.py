"""Near ties: rounding decides between two tokens with almost equal logits, and rounding to bfloat16 between two experts
with almost equal scores, here and in transformers.

A token that goes to another expert has a different result, and through attention so have all later tokens. So that the
rest can be compared, the reference is made to follow our choice in such rows. The tests bound their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from penstock_server.layers.experts.routing import Router
from penstock_server.layers.step import StepContext
from torch import Tensor, nn

# Share of a row's total weight. Rounding changes weights by less than 1%, another expert by more than this.
DIFFERENT = 0.05


def assert_greedy(logits: Tensor, token_ids: list[int]) -> None:
    """logits [tokens, vocab] float32: each token is the greatest, or below it by no more than rounding."""
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, logits.amax(-1), atol=1e-4, rtol=1e-4)


def has_experts(reference: transformers.PreTrainedModel) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in reference.modules())


@dataclass
class Followed:
    """Our choices of one step by layer, and the number of rows in which the reference was changed to follow them."""

    choices: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # weights, experts: [rows, top_k]
    num_layers: int = 0  # layers of the reference that have run
    num_rows: int = 0
    num_changed: int = 0

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Records the choices of our routers from now on."""
        choose = Router.__call__

        def spy(router: Router, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
            self.choices.append(choose(router, x, step))
            return self.choices[-1]

        monkeypatch.setattr(Router, "__call__", spy)

    def lead(self, reference: transformers.PreTrainedModel) -> None:
        """Makes the reference follow: its mixtures of experts are modules `...Experts`, called with x, experts,
        weights."""
        for module in reference.modules():
            name = type(module).__name__
            if name == "Llama4Router":
                module.register_forward_hook(self._follow_scores)
            elif name.endswith("Experts") and name != "Llama4TextExperts":
                module.register_forward_pre_hook(self._follow)

    def _follow(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, experts, weights = args
        our_weights, our_experts = self.choices[self.num_layers]
        num_experts = int(max(experts.max(), our_experts.max())) + 1
        theirs = torch.zeros(len(experts), num_experts).scatter_(1, experts, weights.float())
        changed, _ = self._differing(theirs)
        experts, weights = experts.clone(), weights.clone()
        experts[changed], weights[changed] = our_experts[changed], our_weights[changed].to(weights.dtype)
        return x, experts, weights

    def _follow_scores(self, _module: nn.Module, _args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
        """Follows a router that returns weights [rows, experts], which are 0 for the experts that are not chosen."""
        weights, logits = output
        changed, ours = self._differing(weights.float())
        weights = weights.clone()
        weights[changed] = ours[changed].to(weights.dtype)
        return weights, logits

    def _differing(self, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the reference's next layer sends each row elsewhere, and our weights. theirs: [rows, experts]"""
        weights, experts = self.choices[self.num_layers]
        ours = torch.zeros_like(theirs).scatter_(1, experts, weights.float())
        changed = (ours - theirs).abs().amax(dim=1) > DIFFERENT * theirs.sum(dim=1)
        self.num_layers += 1
        self.num_rows += len(changed)
        self.num_changed += int(changed.sum())
        return changed, ours
