"""A prompt and decode steps of the architectures on a fake CUDA device: nothing waits for the device, all inputs are
copied at once, and a layer launches few kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import CASES
from fake_cuda import Launches, Recorder, fake_cuda, load
from penstock_server.layers.experts import MixtureOfExperts
from penstock_server.layers.interpreter import AddAndNorm, Run, TransformAndWrite
from penstock_server.layers.latent_attention import LatentAttentionBlock
from penstock_server.layers.operation import Operation, Program, Register
from penstock_server.models.layer import Layer
from penstock_server.protocol.plan import Advances, NewSequence, Plan
from tiny_model import save_case

# For one rank; several ranks add their collectives, and gather queries and keys for norms over all heads.
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
# Experts whose inputs are scaled: the weights in the model's data type, their products with the rows, and weights of
# 1 for the sum.
SCALED_LAUNCHES = 3
# Queries that are scaled by position.
TEMPERATURE_LAUNCHES = 5


# States have no kernels for GPUs yet: torch computes them, and waits for the device.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.keeps_state])
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
        layers = recorded_layers(launches, monkeypatch)
        engine = load(folder)
        for plan in plans:
            launches.num_uploads = launches.num_downloads = 0
            for _, attention, mlp in layers:
                attention.clear()
                mlp.clear()
            with Recorder(launches):
                engine.launch(plan)
            assert (launches.num_uploads, launches.num_downloads) == (1, 1)
        engine.close()
    layers = [each for each in layers if each[1]]  # without those of an encoder, in a step without sources
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
    """The layers that are loaded from now on, and what each launches without and in its MLP or experts."""
    found: list[tuple[Layer, Counter[str], Counter[str]]] = []
    counters: dict[int, Counter[str]] = {}  # by operation
    operations = []  # kept alive, so that each keeps its identity
    append_layer, apply = Layer.append_to, Run.apply

    def append_and_note(layer: Layer, program: Program, *, is_last: bool) -> None:
        attention, mlp = Counter[str](), Counter[str]()
        found.append((layer, attention, mlp))

        def append_mlp(program: Program, source: Register, target: Register) -> None:
            first = len(program.operations)
            layer.mlp.append_to(program, source, target)
            counters.update((id(each), mlp) for each in program.operations[first:])

        first = len(program.operations)
        append_layer(replace(layer, mlp=SimpleNamespace(append_to=append_mlp)), program, is_last=is_last)
        operations.extend(program.operations[first:])
        for each in program.operations[first:]:
            counters.setdefault(id(each), attention)

    def counted_apply(run: Run, operation: Operation) -> None:
        before = launches.kernels.copy()
        apply(run, operation)
        written = operation.add if isinstance(operation, AddAndNorm) else operation
        written = operation.write if isinstance(operation, TransformAndWrite) else written
        if id(written) in counters:  # not the final norm
            counters[id(written)].update(launches.kernels - before)

    monkeypatch.setattr(Layer, "append_to", append_and_note)
    monkeypatch.setattr(Run, "apply", counted_apply)
    return found
