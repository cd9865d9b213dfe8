"""A prompt and decode steps of every architecture on a fake CUDA device: nothing waits for the device, all inputs are
copied at once, and a layer launches few kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from fake_cuda import Launches, Recorder, fake_cuda, load
from penstock_server.layers.experts import MixtureOfExperts
from penstock_server.layers.latent_attention import LatentAttentionBlock
from penstock_server.models.layer import Layer
from penstock_server.protocol.plan import Advances, NewSequence, Plan
from tiny_model import save_case

# Of one rank; several add their collectives, and gather queries and keys for norms over all heads.
# A layer without its MLP or experts: two matrix products, two norms, the KV write with all that is done to queries and
# keys before, attention, and the merge of its splits. With an MLP, ten launches.
ATTENTION_LAUNCHES = 7
# Latent attention has three more matrix products: from the latent of queries to the heads, and from and to the latent
# of keys.
LATENT_LAUNCHES = 3
# Attention over a source: two matrix products, a norm, attention, and the merge. The source's keys are in the cache.
CROSS_LAUNCHES = 5
# Two matrix products and an activation.
MLP_LAUNCHES = 3
# The router's logits, the choice, gate and up with their activation, down, and the weighted sum.
EXPERT_LAUNCHES = 5
# Of experts whose inputs are scaled: the weights in the model's data type, their products with the rows, and weights of
# 1 for the sum.
SCALED_LAUNCHES = 3
# Queries that are scaled by position.
TEMPERATURE_LAUNCHES = 5


@pytest.mark.parametrize("name", CASES)
def test_steps_are_copied_at_once_and_launch_few_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_case(name, tmp_path)
    num_source = 3 if CASES[name].has_encoder else 0
    num_tokens = max(5, CASES[name].shortest)
    new = [
        NewSequence(i, [7] * num_tokens, num_tokens, block_ids=[2 * i, 2 * i + 1], num_source_tokens=num_source)
        for i in range(2)
    ]
    plans = [
        Plan(1, new_sequences=new, advances=Advances.of([0, 1], [num_tokens] * 2, [True] * 2)),
        Plan(2, advances=Advances.of([0, 1], [1, 1], [True, True])),
    ]
    with fake_cuda() as launches:
        engine = load(folder)
        layers = recorded_layers(launches, monkeypatch)
        for plan in plans:
            launches.num_uploads = launches.num_downloads = 0
            layers.clear()
            with Recorder(launches):
                engine.launch(plan)
            assert (launches.num_uploads, launches.num_downloads) == (1, 1)
        engine.close()
    assert layers
    for index, (layer, attention, mlp) in enumerate(layers):
        assert mlp.total() == mlp_launches(layer), mlp
        if index > 0:  # the first layer also makes the attention's metadata of the step
            attention["reduce_kernel"] = attention["attend_kernel"]  # launched for long contexts
            assert attention.total() <= attention_launches(layer), attention


def attention_launches(layer: Layer) -> int:
    """At most, without its MLP or experts."""
    has_cross, is_latent = layer.cross is not None, isinstance(layer.attention, LatentAttentionBlock)
    is_scaled = not is_latent and layer.spec.plain_attention.temperature is not None
    others = CROSS_LAUNCHES * has_cross + LATENT_LAUNCHES * is_latent + TEMPERATURE_LAUNCHES * is_scaled
    return ATTENTION_LAUNCHES + others


def mlp_launches(layer: Layer) -> int:
    if not isinstance(layer.mlp, MixtureOfExperts):
        return MLP_LAUNCHES
    of_experts = EXPERT_LAUNCHES + SCALED_LAUNCHES * layer.mlp.spec.routing.scales_inputs
    return of_experts + (0 if layer.mlp.shared is None else MLP_LAUNCHES)


def recorded_layers(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Layer, Counter[str], Counter[str]]]:
    """What each layer of a decoder launches from now on, without and in its MLP or experts."""
    found: list[tuple[Layer, Counter[str], Counter[str]]] = []
    run = Layer.run

    def counted(function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            before = launches.kernels.copy()
            result = function(*arguments)
            counts.update(launches.kernels - before)
            return result

        return recorded

    def recorded_run(layer: Layer, *arguments: Any) -> None:
        of_layer, of_mlp = Counter[str](), Counter[str]()
        counted(run, of_layer)(replace(layer, mlp=counted(layer.mlp, of_mlp)), *arguments)
        found.append((layer, of_layer - of_mlp, of_mlp))

    monkeypatch.setattr(Layer, "run", recorded_run)
    return found
