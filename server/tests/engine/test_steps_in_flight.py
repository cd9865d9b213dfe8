"""Steps that are launched before earlier ones are collected, on a device whose results arrive late; with and without
recorded graphs of decode steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_cuda import record_eagerly
from fake_model import BLOCK_TOKENS, POISON, FakeModel, continuation, load_fake
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateEvent, make_late
from penstock_server.engine import Engine, graphs
from penstock_server.engine.drafting import ngram
from penstock_server.engine.step import BROKEN_LOGITS, Pending
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Plan, Sampling, StepResult
from plans import Advance, plan
from plans import listed as plain_tokens

NUM_BLOCKS = 64
SAMPLINGS = [
    Sampling(),
    Sampling(do_sample=True, seed=3, temperature=50.0),
    Sampling(prompt_logprobs=True, top_n=2),
    Sampling(do_sample=True, seed=4, temperature=40.0, prompt_logprobs=True),
]
WITH_HISTORY = [
    Sampling(frequency_penalty=3.0, do_sample=True, temperature=30.0),
    Sampling(watermark=True, do_sample=True, temperature=30.0),
]


@pytest.fixture(autouse=True, scope="module")
def late_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_server.engine.engine.choose_num_threads", lambda config, world_size: 1)
        make_late(patch)
        yield


@pytest.fixture(scope="module")
def engines(late_device: None) -> dict[bool, Engine]:
    """Without and with graphs."""
    return {has_graphs: make_engine(has_graphs) for has_graphs in (False, True)}


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def engine(request: pytest.FixtureRequest, engines: dict[bool, Engine]) -> Engine:
    return engines[request.param]


def make_engine(has_graphs: bool, **options: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeModel, "traits", replace(FakeModel.traits, is_recordable=has_graphs))
        patch.setattr("penstock_server.engine.start.CudaRecorder", lambda: record_eagerly)
        patch.setattr(graphs, "FIRST_CONTEXT_TOKENS", 8)
        config = LoadConfig(Path("nowhere"), BLOCK_TOKENS, dtype="float32", **options)
        engine, _ = Engine.load(config, load_model=load_fake)
        engine.warm_up(WarmUpConfig(max_step_tokens=64, max_step_sequences=8, num_blocks=NUM_BLOCKS, proven=True))
    return engine


def random_plans(seed: int, samplings: list[Sampling]) -> list[Plan]:
    """Plans of a router that does not wait for results: chunks, decodes, aborts, ids that come back, broken logits."""
    draw = random.Random(seed)
    plans: list[Plan] = []
    lengths: dict[int, int] = {}  # known tokens of the running sequences
    computed: dict[int, int] = {}
    blocks = {sequence_id: range(8 * sequence_id, 8 * sequence_id + 8) for sequence_id in range(8)}
    for number in range(1, 25):
        freed = [i for i in lengths if lengths[i] > 25 or draw.random() < 0.08]
        for sequence_id in freed:
            del lengths[sequence_id], computed[sequence_id]
        new = []
        for sequence_id in draw.sample(range(8), 2):
            if sequence_id not in lengths and len(lengths) < 5:
                tokens = [draw.randrange(20, 900) for _ in range(draw.randrange(1, 12))]
                if draw.random() < 0.2:
                    tokens[draw.randrange(len(tokens))] = POISON
                lengths[sequence_id], computed[sequence_id] = len(tokens), 0
                sampling = draw.choice(samplings)
                new.append(NewSequence(sequence_id, tokens, len(tokens), 0, blocks[sequence_id], sampling))
        advances = []
        for sequence_id in draw.sample(sorted(lengths), len(lengths)):
            left = lengths[sequence_id] - computed[sequence_id]
            num = left if draw.random() < 0.6 else draw.randrange(0, left + 1)
            if num:
                computed[sequence_id] += num
                lengths[sequence_id] += num == left
                advances.append(Advance(sequence_id, num, sample=num == left))
        plans.append(plan(number, freed, new, advances))
    return plans


def run(engine: Engine, plans: list[Plan], max_in_flight: int) -> list[StepResult]:
    engine.reset()
    results: list[StepResult] = []
    in_flight: list[Pending] = []
    for one in plans:
        in_flight.append(engine.launch(one))
        if len(in_flight) >= max_in_flight:
            results.append(engine.collect(in_flight.pop(0)))
    return results + [engine.collect(pending) for pending in in_flight]


def listed(result: StepResult) -> Any:
    """What can be compared."""

    def tokens(found: Any) -> Any:
        return found.ids.tolist(), found.logprobs.tolist(), dict(found.tops)

    failures = {failure.sequence_id: (failure.reason, failure.fault) for failure in result.failures}
    prompts = {sequence_id: tokens(found) for sequence_id, found in result.prompts.items()}
    return result.step, result.sequence_ids.tolist(), tokens(result.sampled), prompts, failures


@given(seed=st.integers(0, 1 << 30), with_history=st.booleans(), max_in_flight=st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_any_depth_gives_the_results_of_one_step_at_a_time(
    engine: Engine, seed: int, with_history: bool, max_in_flight: int
) -> None:
    plans = random_plans(seed, SAMPLINGS + WITH_HISTORY if with_history else SAMPLINGS)
    alone = run(engine, plans, 1)
    assert [listed(result) for result in run(engine, plans, max_in_flight)] == [listed(result) for result in alone]


class Guesses:
    """Stands for the search: greedy continuations of 0 to 3 tokens, some of them wrong. The same text has the same."""

    def __call__(self, history: np.ndarray, most: int) -> np.ndarray:
        draw = random.Random(history.tobytes())
        guessed = continuation(history.tolist(), draw.randrange(most + 1))
        return np.array([token if draw.random() < 0.7 else 5 for token in guessed], np.int32)


def drafting_plans(seed: int, max_drafts: int) -> list[Plan]:
    """Plans of a router that knows no result: it allows drafts in some of the decodes of two sequences, one of which is
    freed, and followed by another one."""
    draw = random.Random(seed)
    new = [NewSequence(i, [21 + i, 22], 2, 0, range(16 * i, 16 * i + 16), draw.choice(DRAFTED)) for i in range(3)]
    plans = [plan(1, (), new[:2], [Advance(i, 2, sample=True) for i in range(2)])]
    for number in range(2, 11):
        freed, started = ((0,), [new[2]]) if number == 6 else ((), [])
        drafts = [draw.choice((0, max_drafts)) for _ in range(2)]
        running = (0, 1) if number < 6 else (2, 1)
        advances = [Advance(i, 1, (), True, num) for i, num in zip(running, drafts, strict=True)]
        if started:
            advances[0] = Advance(2, 2, (), True)
        plans.append(plan(number, freed, started, advances))
    return plans


DRAFTED = [Sampling(), Sampling(top_n=2), Sampling(do_sample=True, seed=3, temperature=8.0), WITH_HISTORY[0]]


@given(seed=st.integers(0, 1 << 30), max_in_flight=st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_drafts_change_nothing_at_any_depth(engine: Engine, seed: int, max_in_flight: int) -> None:
    def generated(results: list[StepResult]) -> dict[int, list[Any]]:
        tokens: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for result in results:
            for sequence_id, token in zip(result.sequence_ids.tolist(), plain_tokens(result.sampled), strict=True):
                tokens[sequence_id].append(token)
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "continuation", Guesses())
        alone = run(engine, drafting_plans(seed, 3), 1)
        ahead = run(engine, drafting_plans(seed, 3), max_in_flight)
    assert [listed(result) for result in ahead] == [listed(result) for result in alone]
    expected, found = generated(run(engine, drafting_plans(seed, 0), 1)), generated(alone)
    for sequence_id, tokens in expected.items():
        assert found[sequence_id][: len(tokens)] == tokens


@pytest.fixture
def right_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lambda history, most: np.array(continuation(history.tolist(), most), np.int32)  # noqa: E731
    monkeypatch.setattr(ngram, "continuation", right)


@pytest.mark.usefixtures("right_drafts")
def test_a_step_with_drafts_waits_only_for_earlier_steps_and_is_timed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    text, before_model = [21, 22, 23], list[int]()
    monkeypatch.setattr(engine.model, "started", Mock(set=lambda: before_model.append(LateEvent.num_waits)))
    LateEvent.num_waits = 0
    drafting, plain = Advance(1, 1, (), True, 3), Advance(1, 1, (), True)
    pending = [engine.launch(plan(1, (), [NewSequence(1, text, 3, 0, range(8))], [Advance(1, 3, sample=True)]))]
    pending += [engine.launch(plan(step, advances=[each])) for step, each in enumerate((drafting, plain, plain), 2)]
    assert before_model == [0, 1, 2, 2], "for what a draft continues, and for which drafts were right"
    assert LateEvent.num_waits == 2, "no launch waits behind its model"
    results = [engine.collect(each) for each in pending]
    tokens = [token for result in results for token in result.sampled.ids.tolist()]
    assert tokens == continuation(text, len(tokens))
    assert [result.timing.draft_s for result in results] == [0.0, 0.0025, 0.0025, 0.0]


@pytest.mark.usefixtures("right_drafts")
def test_a_step_behind_drafts_may_have_no_result(engine: Engine) -> None:
    """Only a part of a prompt: nothing of it is awaited, and its time of waiting is read."""
    engine.reset()
    new = NewSequence(1, [21, 22, 23], 3, 0, range(8))
    pending = [engine.launch(plan(1, (), [new], [Advance(1, 3, sample=True)]))]
    pending.append(engine.launch(plan(2, advances=[Advance(1, 1, (), True, 3)])))
    chunk = NewSequence(2, [31, 32, 33], 3, 0, range(8, 16))
    pending.append(engine.launch(plan(3, (), [chunk], [Advance(2, 2)])))
    results = [engine.collect(each) for each in pending]
    assert [result.timing.draft_s for result in results] == [0.0, 0.0025, 0.0025]
    assert not len(results[2].sequence_ids)


def test_an_end_awaits_only_steps_that_sample_for_the_sequence() -> None:
    """Its answer becomes a source of drafts, so its tokens must be known."""
    engine = make_engine(has_graphs=False, recent_answer_tokens=100)
    new = [NewSequence(i, [21, 22], 2, 0, range(8 * i, 8 * i + 8)) for i in range(3)]
    pending = [engine.launch(plan(1, (), new, [Advance(i, 2, sample=True) for i in range(3)]))]
    pending.append(engine.launch(plan(2, advances=[Advance(i, 1, sample=True) for i in (1, 2)])))
    LateEvent.num_waits = 0
    pending.append(engine.launch(plan(3, [0], advances=[Advance(2, 1, sample=True)])))
    assert LateEvent.num_waits == 1, "for the first step"
    pending.append(engine.launch(plan(4, [1], advances=[Advance(2, 1, sample=True)])))
    assert LateEvent.num_waits == 2, "for the second one"
    results = [engine.collect(each) for each in pending]
    assert [int(result.sampled.ids[-1]) for result in results] == continuation([21, 22], 4)
    assert [result.timing.draft_s for result in results] == [0.0, 0.0, 0.0025, 0.0025], "the scheduler learns of it"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_recorded_steps_give_the_results_of_steps_without_graphs(engines: dict[bool, Engine], seed: int) -> None:
    plans = random_plans(seed, SAMPLINGS + WITH_HISTORY)
    eager, recorded = ([listed(result) for result in run(engines[each], plans, 2)] for each in (False, True))
    assert recorded == eager


def test_a_sequence_takes_its_input_from_the_device_while_two_steps_are_in_flight(engine: Engine) -> None:
    engine.reset()
    text, blocks = [21, 22, 23], range(3)
    LateEvent.num_waits = 0
    first = engine.launch(plan(1, (), [NewSequence(1, text, 3, 0, blocks)], [Advance(1, 3, sample=True)]))
    second = engine.launch(plan(2, advances=[Advance(1, 1, sample=True)]))
    assert LateEvent.num_waits == 0, "nothing is on the host when the second step starts"
    results = [engine.collect(first), engine.collect(second)]
    assert [int(result.sampled.ids[0]) for result in results] == continuation(text, 2)


@pytest.mark.parametrize("sampling", WITH_HISTORY, ids=["penalty", "watermark"])
def test_a_sequence_that_reads_its_history_waits_for_it_after_the_model_was_started(
    engine: Engine, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    LateEvent.num_waits = 0
    waits_before_model: list[int] = []
    started = Mock(set=lambda: waits_before_model.append(LateEvent.num_waits))
    monkeypatch.setattr(engine.model, "started", started)
    new = NewSequence(1, [21, 22, 23], 3, 0, range(3), sampling)
    first = engine.launch(plan(1, (), [new], [Advance(1, 3, sample=True)]))
    second = engine.launch(plan(2, advances=[Advance(1, 1, sample=True)]))
    assert waits_before_model == [0, 0]
    assert LateEvent.num_waits == 1
    for pending in (first, second):
        engine.collect(pending)


def test_other_sequences_do_not_wait_for_one_that_reads_its_history(engine: Engine) -> None:
    engine.reset()
    new = [NewSequence(1, [21, 22], 2, 0, [0, 1], WITH_HISTORY[0]), NewSequence(2, [21, 22], 2, 0, [2, 3])]
    first = engine.launch(plan(1, (), new, [Advance(1, 2, sample=True), Advance(2, 2, sample=True)]))
    LateEvent.num_waits = 0
    second = engine.launch(plan(2, advances=[Advance(2, 1, sample=True)]))
    assert LateEvent.num_waits == 0
    results = [engine.collect(first), engine.collect(second)]
    assert [int(result.sampled.ids[-1]) for result in results] == continuation([21, 22], 2)


def test_broken_logits_end_the_sequence_in_steps_that_were_launched_before_they_were_seen(engine: Engine) -> None:
    engine.reset()
    new = [NewSequence(1, [21, POISON], 2, 0, [0, 1]), NewSequence(2, [21, 22], 2, 0, [2, 3])]
    both = [Advance(1, 1, sample=True), Advance(2, 1, sample=True)]
    first = engine.launch(plan(1, (), new, [Advance(1, 2, sample=True), Advance(2, 2, sample=True)]))
    second = engine.launch(plan(2, advances=both))
    results = [engine.collect(first), engine.collect(second)]
    assert [[failure.reason for failure in result.failures] for result in results] == [[BROKEN_LOGITS]] * 2
    assert [result.sequence_ids.tolist() for result in results] == [[2], [2]]
    assert np.concatenate([result.sampled.ids for result in results]).tolist() == continuation([21, 22], 2)
