"""A prompt and decode steps of every architecture on a fake CUDA device: nothing waits for the device, all inputs are
copied at once, and a dense layer launches few kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from fake_cuda import Launches, Recorder, fake_cuda, load
from penstock_server.layers.attention import AttentionBlock
from penstock_server.layers.mlp import Mlp
from penstock_server.models.layer import Layer
from penstock_server.plan import Advances, NewSequence, Plan
from tiny_model import save_case

MAX_DENSE_LAUNCHES = 10
# With several splits of the context, their merge is one more launch; the contexts here have one.
MERGES = 1


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
        by_layer = dense_launches(launches, monkeypatch)
        for plan in plans:
            launches.num_uploads = launches.num_downloads = 0
            by_layer.clear()
            with Recorder(launches):
                engine.launch(plan)
            assert (launches.num_uploads, launches.num_downloads) == (1, 1)
        engine.close()
    print(name, sorted({sum(c.values()) for c in by_layer}), by_layer[0] if by_layer else None)


def dense_launches(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """What each dense layer without an encoder launches from now on."""
    found: list[Counter[str]] = []
    run = Layer.run

    def recorded(layer: Layer, *arguments: Any) -> None:
        before = launches.kernels.copy()
        run(layer, *arguments)
        if isinstance(layer.attention, AttentionBlock) and isinstance(layer.mlp, Mlp):
            found.append(launches.kernels - before)

    monkeypatch.setattr(Layer, "run", recorded)
    return found
