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

# Four matrix products, two norms, activation, rotation with the KV write, attention, and the merge of its splits.
MAX_DENSE_LAUNCHES = 10

BEHIND = "two norms behind attention and MLP"
SUMS = "two sums that no norm follows"
CROSS = "a second attention, over the source"
# More launches than that in a decode step, and for what.
EXCEPTIONS: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("gpt-neox", "falcon-40b"), (11, "the sum of attention and MLP")),
    **dict.fromkeys(("mpt", "olmo"), (11, "a clamp of queries, keys and values")),
    **dict.fromkeys(("gemma2", "gemma3", "glm4"), (12, BEHIND)),
    **dict.fromkeys(("exaone4", "exaone4-no-window"), (12, SUMS)),
    "granite": (12, "scales of the outputs of attention and MLP"),
    "hunyuan": (13, "norms of queries and keys after the rotation, which is a kernel of its own then"),
    **dict.fromkeys(("olmo2", "olmo3"), (14, f"norms over all heads of queries and of keys, and {SUMS}")),
    **dict.fromkeys([name for name, case in CASES.items() if case.has_encoder], (15, CROSS)),
}


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
    if not by_layer:
        return  # all layers have experts
    # The first layer also makes the attention's metadata of the step; a merge of splits is launched for long contexts.
    fewest = min(sum((found + Counter(merge=found["attend_kernel"])).values()) for found in by_layer)
    expected, _ = EXCEPTIONS.get(name, (fewest, ""))
    assert fewest == expected
    assert (fewest > MAX_DENSE_LAUNCHES) == (name in EXCEPTIONS), by_layer[-1]


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
