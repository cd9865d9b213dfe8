"""Encoder sources in plans and batches: a broken rule fails one sequence; a step is split into sources and decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine import batch, warmup
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.protocol.plan import NewSequence, Plan, Sampling
from plans import Advance, columns

BLOCK_TOKENS = 4


def new_table(max_source_tokens: int = 10) -> SequenceTable:
    return SequenceTable(TableLimits(1000, BLOCK_TOKENS, 64, 100, 4, max_source_tokens))


def sequence(sequence_id: int, num_source: int, num_prompt: int, num_tokens: int | None = None) -> NewSequence:
    """A sequence with the tokens 10, 11, 12, … and its own blocks."""
    ids = [10 + place for place in range(num_tokens or num_prompt)]
    blocks = range(sequence_id * 10, sequence_id * 10 + 10)
    return NewSequence(sequence_id, ids, num_prompt, 0, blocks, num_source_tokens=num_source)


BROKEN_SOURCES = {
    "no source": (sequence(1, 0, 5), 10, "has no source tokens, but the model has an encoder"),
    "no encoder": (sequence(1, 4, 5), 0, "has 4 source tokens, but the model has no encoder"),
    "too long": (sequence(1, 11, 12), 10, "has 11 source tokens, at most 10 are allowed"),
    "nothing behind": (sequence(1, 5, 5), 10, "has 5 source tokens, so its prompt must have more than 5"),
    "computed": (
        NewSequence(1, [1] * 9, 9, 4, [1, 2, 3], num_source_tokens=5),
        10,
        "has 4 computed tokens of a source of 5, which are computed together",
    ),
}


@pytest.mark.parametrize(("new", "limit", "reason"), BROKEN_SOURCES.values(), ids=BROKEN_SOURCES.keys())
def test_a_sequence_that_breaks_the_rules_of_sources_is_reported_at_its_advance(
    new: NewSequence, limit: int, reason: str
) -> None:
    table = new_table(limit)
    table.add(new)
    table.add(sequence(2, 5 if limit else 0, 6))
    chosen = batch.select(table, columns([Advance(1, 5), Advance(2, 6)]))
    assert {failure.sequence_id: failure.reason for failure in chosen.failures} == {1: reason}
    assert chosen.sequence_ids.tolist() == [2]


def test_a_split_source_fails_its_sequence_alone() -> None:
    table = new_table()
    table.add(sequence(1, 7, 9))
    table.add(sequence(2, 7, 9))
    chosen = batch.select(table, columns([Advance(1, 6), Advance(2, 7)]))
    assert {failure.sequence_id: failure.reason for failure in chosen.failures} == {
        1: "an advance to 6 tokens, but its source has 7, which are computed together"
    }
    assert chosen.sequence_ids.tolist() == [2]


def test_penalties_count_decoder_tokens_only() -> None:
    table = new_table()
    table.add(sequence(1, 5, 7, num_tokens=9))  # 15, 16 start the decoder, 17, 18 were sampled
    table.add(sequence(2, 2, 3))
    rows = table.rows([1, 2])
    assert table.first_ids(rows, table.known[rows]).tolist() == [[15, 16, 17, 18], [12, 12, 12, 12]]
    ids, real = table.generated_ids(rows, table.known[rows])
    assert (ids[real].tolist(), real.tolist()) == ([17, 18], [[True, True], [False, False]])


def test_prompt_logprobs_are_of_the_decoder_s_prompt_only() -> None:
    table = new_table()
    new = sequence(1, 4, 7)
    table.add(NewSequence(1, new.token_ids, 7, 0, new.block_ids, Sampling(prompt_logprobs=True), num_source_tokens=4))
    built = batch.build(table, batch.select(table, columns([Advance(1, 7, sample=True)])))
    assert built.prompt is not None
    assert built.prompt.ids.tolist() == [15, 16]
    assert built.batch.sample_rows.tolist() == [0, 1, 2]  # rows of the tokens after the source


def test_a_model_without_an_encoder_gets_no_source_lengths() -> None:
    table = new_table(max_source_tokens=0)
    table.add(sequence(1, 0, 5))
    built = batch.build(table, batch.select(table, columns([Advance(1, 5)]))).batch
    assert built.source_lens is built.sources is None


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_step_is_split_into_sources_and_decoder_tokens(data: st.DataObject) -> None:
    table = new_table()
    advances, of_source, of_answer = [], [], []
    for sequence_id in range(1, data.draw(st.integers(1, 4)) + 1):
        num_source = data.draw(st.integers(1, 10))
        num_known = data.draw(st.integers(num_source + 1, num_source + 12))
        table.add(sequence(sequence_id, num_source, num_known))
        begin = data.draw(st.sampled_from([0, *range(num_source, num_known)]))
        stop = data.draw(st.integers(max(begin + 1, num_source), num_known))
        table.computed[table.rows([sequence_id])] = begin
        advances.append(Advance(sequence_id, stop - begin, sample=stop == num_known))
        slots = [sequence_id * 10 * BLOCK_TOKENS + position for position in range(stop)]
        of_source.append((slots[begin : num_source if begin == 0 else begin], num_source))
        first = max(begin, num_source)
        of_answer.append((slots[first:], [p - num_source for p in range(first, stop)], stop, stop == num_known))
    built = batch.build(table, batch.select(table, columns(advances)))
    answers, sources = built.batch, built.batch.sources
    expected = [(slots, num) for slots, num in of_source if slots]
    assert (sources is None) == (not expected)
    if sources is not None:
        assert sources.slots.tolist() == [slot for slots, _ in expected for slot in slots]
        assert np.diff(sources.query_starts).tolist() == [len(slots) for slots, _ in expected]
        assert sources.context_lens.tolist() == [num for _, num in expected]
        assert sources.sample_rows.tolist() == []
    expected = [answer for answer in of_answer if answer[0]]
    assert answers.slots.tolist() == [slot for slots, *_ in expected for slot in slots]
    assert answers.positions.tolist() == [p for _, positions, *_ in expected for p in positions]
    assert np.diff(answers.query_starts).tolist() == [len(slots) for slots, *_ in expected]
    assert answers.context_lens.tolist() == [stop for _, _, stop, _ in expected]
    assert answers.slots[answers.sample_rows].tolist() == [slots[-1] for slots, *_, ends in expected if ends]
    ends = [tokens for tokens, (slots, *_) in zip(built.last_tokens.tolist(), of_answer, strict=True) if slots]
    assert answers.slots[ends].tolist() == [slots[-1] for slots, *_ in expected]


def test_warm_up_runs_a_step_full_of_sources() -> None:
    limits = warmup.WorstStep(100, 8, 60, max_context_tokens=200, block_tokens=4, max_source_tokens=24)
    assert warmup.sources(limits) == ([25] * 4, [25] * 4)
    (*_, (name, _)) = warmup.worst_steps(limits)
    assert name == "worst sources"
    sources = warmup.plan(limits, warmup.sources(limits))
    assert [new.num_source_tokens for new in sources.new_sequences] == [24] * 4
    decodes = warmup.plan(limits, warmup.decode(limits))
    assert [new.num_source_tokens for new in decodes.new_sequences] == [24] + [19] * 7
    assert len(warmup.worst_steps(warmup.WorstStep(100, 8, 60, 200, 4))) == 3


@pytest.mark.parametrize("max_step_tokens", [16, 40, 47, 100])
def test_warm_up_plans_no_continuation_beyond_the_decoder_s_limit(max_step_tokens: int) -> None:
    limits = warmup.WorstStep(max_step_tokens, 8, 48, 200, 4, max_source_tokens=24, max_answer_tokens=24)
    for name, plan in worst_steps_and_first(limits):
        answers = [len(new.token_ids) - new.num_source_tokens for new in plan.new_sequences]
        assert max(answers) <= 24, name


def worst_steps_and_first(limits: warmup.WorstStep) -> list[tuple[str, Plan]]:
    return [("first step", warmup.plan(limits, warmup.first(limits))), *warmup.worst_steps(limits)]


@pytest.mark.parametrize("max_source_tokens", [0, 1, 24, 80])
@pytest.mark.parametrize(("max_step_tokens", "max_context_tokens"), [(8, 60), (100, 200), (101, 70), (101, 101)])
def test_the_table_accepts_every_plan_of_warm_up(
    max_source_tokens: int, max_step_tokens: int, max_context_tokens: int
) -> None:
    limits = warmup.WorstStep(max_step_tokens, 8, 60, max_context_tokens, 4, max_source_tokens)
    for _, plan in worst_steps_and_first(limits):
        table = SequenceTable(TableLimits(100, 4, limits.num_blocks(), 60, 8, max_source_tokens))
        for new in plan.new_sequences:
            table.add(new)
        assert not batch.select(table, plan.advances).failures
        assert plan.advances.num_tokens.sum() <= max_step_tokens
