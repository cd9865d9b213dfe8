"""The whole step as a CUDA device would run it: nothing waits for the device, and few kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from fake_cuda import FakeEvent, Launches, Recorder, fake_cuda, launched, load
from mtp_checkpoint import Reference
from penstock_server.engine import Engine
from penstock_server.engine.device_progress import Progress
from penstock_server.protocol.plan import Advances, NewSequence, Plan, Sampling
from penstock_server.watermark import GreenLists

Loaded = tuple[Engine, Launches]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model(tiny_models.make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def loaded(folder: Path) -> Iterator[Loaded]:
    with fake_cuda() as launches:
        engine = load(folder)
        yield engine, launches
        engine.close()


def prefill(*samplings: Sampling) -> Plan:
    """Three tokens of each sequence."""
    ids = range(len(samplings))
    new = [NewSequence(i, [1, 2, 3], 3, block_ids=[i], sampling=sampling) for i, sampling in enumerate(samplings)]
    return Plan(1, new_sequences=new, advances=Advances.of([*ids], [3] * len(ids), [True] * len(ids)))


def decode(step: int, num_sequences: int) -> Plan:
    return Plan(step, advances=Advances.of([*range(num_sequences)], [1] * num_sequences, [True] * num_sequences))


def test_a_greedy_step_is_launched_before_the_last_one_is_collected(loaded: Loaded) -> None:
    launched(loaded, prefill(Sampling(), Sampling()))
    for step in (2, 3):
        assert launched(loaded, decode(step, 2)).num_kernels


def test_every_layer_launches_the_same_kernels_at_any_batch_size(loaded: Loaded) -> None:
    launched(loaded, prefill(*[Sampling()] * 8))
    of_eight = launched(loaded, decode(2, 8)).kernels.copy()
    loaded[0].reset()
    launched(loaded, prefill(Sampling()))
    assert launched(loaded, decode(2, 1)).kernels == of_eight
    num_layers = tiny_models.BASE["num_hidden_layers"]
    assert of_eight["attend_kernel"] == of_eight["write_kernel"] == num_layers


def test_a_layer_launches_nine_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four matrix products, two norms, a gate, the rotation with the KV write, and attention; with a context of several
    splits, their merge is the tenth."""
    totals = []
    for num_layers in (2, 5):
        monkeypatch.setitem(tiny_models.BASE, "num_hidden_layers", num_layers)
        folder = tiny_models.save_model(tiny_models.make_model("llama"), tmp_path / str(num_layers))
        with fake_cuda() as launches:
            engine = load(folder)
            launched((engine, launches), prefill(Sampling(), Sampling()))
            totals.append(launched((engine, launches), decode(2, 2)).num_kernels)
            engine.close()
    assert totals[1] - totals[0] == 3 * 9


def test_a_step_with_drafts_is_copied_at_once_and_launches_what_a_decode_step_does(loaded: Loaded) -> None:
    """All tokens are 0 here, so the drafts of a text of zeros are so, too."""
    new = [NewSequence(0, [0] * 3, 3, block_ids=[0])]
    launched(loaded, Plan(1, new_sequences=new, advances=Advances.of([0], [3], [True])))
    plain = launched(loaded, decode(2, 1)).kernels.copy()
    found = launched(loaded, Plan(3, advances=Advances.of([0], [1], [True], (), [1])))
    assert (found.num_uploads, found.num_downloads) == (1, 1)
    assert loaded[0]._runner._in_flight[-1].chosen.num_drafts.tolist() == [1]
    assert not found.kernels - plain, "it even has its input tokens on the host"
    after = launched(loaded, decode(4, 1))
    assert (after.num_uploads, after.num_downloads) == (1, 1)


@pytest.mark.parametrize("kind", ["draft model", "prediction layer"])
def test_passes_of_a_drafter_wait_for_nothing(kind: str, folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"speculative_model": folder}
    if kind == "draft model":
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    else:
        folder, options = Reference.random().save(tmp_path), {"drafts_with_mtp": True}
    with fake_cuda() as launches:
        engine = load(folder, **options)
        launched((engine, launches), prefill(Sampling(), Sampling()))
        drafter, table = engine._parts.pooled_drafter, engine._runner._table
        rows, twos = table.rows([0, 1]), np.full(2, 2)
        with Recorder(launches):
            first = drafter.next(table, rows, twos - 2, twos, None)
            second = drafter.next(table, rows[1:], twos[1:], twos[1:] - 1, first.select(np.array([1])))
        assert [len(first.ids), len(second.ids)] == [2, 1]
        engine.close()


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "prompt logprobs": {"prompt_logprobs": True},
    "drawn": {"do_sample": True, "seed": 3},
    "temperature": {"do_sample": True, "temperature": 0.5},
    "top-k": {"do_sample": True, "top_k": 5},
    "top-p": {"do_sample": True, "top_p": 0.9},
    "typical-p": {"do_sample": True, "typical_p": 0.9},
    "min-p": {"do_sample": True, "min_p": 0.1},
    "bias": {"logit_bias": ((3, 1.5),)},
    "minimum length": {"min_new_tokens": 2, "stop_token_ids": (1,)},
    "alternatives": {"top_n": 3},
    "own logprobs": {"do_sample": True, "model_logprobs": True},
    "repetition penalty": {"repetition_penalty": 1.2},
    "counting penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "watermark": {"watermark": True},
    "allowed tokens": {"allowed_tokens": b"\x0e"},
    "a bad token": {"bad_words": ((3,),)},
    "bad words": {"bad_words": ((3, 4),)},
}


# What their processors read of earlier tokens is known only after the model was started.
READING_HISTORY = {
    "repetition penalty",
    "counting penalties",
    "watermark",
    "allowed tokens",
    "a bad token",
    "bad words",
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_step_waits_for_nothing_and_is_copied_at_once(
    loaded: Loaded, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The green lists are made on the host, from torch's generator, which has no data here.
    monkeypatch.setattr(GreenLists, "bits", lambda self, ids: np.zeros((len(ids), -(-self.vocab_size // 8)), np.uint8))
    sampling = Sampling(**SAMPLINGS[name])
    for step, plan in enumerate((prefill(sampling, Sampling()), decode(2, 2), decode(3, 2), decode(4, 2)), 1):
        found = launched(loaded, plan)
        assert (found.num_uploads, found.num_downloads) == (2 if name in READING_HISTORY else 1, 1), step
    assert "aten.resize_" not in found.kernels, "the memory of the last upload would have been enough"


def test_health_sees_how_far_the_device_is(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = loaded[0].progress
    assert progress is not None
    launched(loaded, prefill(Sampling()))
    before = progress.ask()
    assert not before.is_busy
    monkeypatch.setattr(FakeEvent, "query", lambda self: False)
    launched(loaded, decode(2, 1))
    assert progress.ask() == Progress(before.num_finished, is_busy=True), "the device hangs"
    monkeypatch.undo()
    assert progress.ask() == Progress(before.num_finished + 2, is_busy=False), "the model, and the end of the step"


def test_the_chunk_of_a_prompt_is_copied_at_once_and_gives_nothing(loaded: Loaded) -> None:
    new = [NewSequence(0, [1] * 9, 9, block_ids=[0])]
    found = launched(loaded, Plan(1, new_sequences=new, advances=Advances.of([0], [4], [False])))
    assert (found.num_uploads, found.num_downloads) == (1, 0)
