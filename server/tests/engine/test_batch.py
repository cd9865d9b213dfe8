"""From plans to tensors: slots, positions and block tables, and the isolation of broken sequences."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.device.attention.interface import StepBatch
from penstock_server.engine import batch, memory
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.protocol.plan import Grammar, NewSequence, Sampling
from plans import Advance, columns

VOCAB = 1000


def new_table(
    block_tokens: int = 4, num_blocks: int = 64, max_sequence_tokens: int = 100, rows: int = 4
) -> SequenceTable:
    return SequenceTable(TableLimits(VOCAB, block_tokens, num_blocks, max_sequence_tokens, rows))


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are read from /proc")
def test_a_table_takes_memory_for_the_tokens_that_it_holds_only() -> None:
    before = memory._status_bytes("VmRSS")
    table = new_table(max_sequence_tokens=1 << 16, rows=64)
    for sequence_id in range(65):  # one more than there are rows
        table.add(NewSequence(sequence_id, [1] * 8, 8))
    assert table.token_ids[:, :8].sum() == 65 * 8
    assert table.token_ids.nbytes == 2 * 64 * 4 * ((1 << 16) + 1)
    assert memory._status_bytes("VmRSS") - before < 4 << 20


def step(table: SequenceTable, advances: list[Advance]) -> tuple[StepBatch | None, dict[int, str]]:
    """Select and build a step, and update the table as the engine does; every sampled token is 7."""
    chosen = batch.select(table, columns(advances))
    built = batch.build(table, chosen).batch.put(torch.from_numpy) if len(chosen.rows) else None
    table.computed[chosen.rows] += chosen.num_tokens
    sampled = chosen.rows[chosen.samples]
    table.token_ids[sampled, table.known[sampled]] = 7
    table.known[sampled] += 1
    return built, {failure.sequence_id: failure.reason for failure in chosen.failures}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_token_is_written_once_to_its_own_slot_for_any_chunks(data: st.DataObject) -> None:
    block_tokens = data.draw(st.integers(1, 5))
    table = new_table(block_tokens, num_blocks=200, rows=2)
    free_blocks = data.draw(st.permutations(range(200)))
    known: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        for gone in data.draw(st.sets(st.sampled_from(sorted(known)), max_size=1)) if known else ():
            assert table.free(gone)
            free_blocks = [*free_blocks, *blocks.pop(gone)]
            del known[gone], computed[gone]
        if len(known) < 5 and data.draw(st.booleans()):
            sequence_id = max(known, default=0) + 1
            ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
            table.add(NewSequence(sequence_id, ids, len(ids)))
            known[sequence_id], blocks[sequence_id], computed[sequence_id] = list(ids), [], 0
        advances: list[Advance] = []
        for sequence_id in data.draw(st.permutations(sorted(known))):
            left = len(known[sequence_id]) - computed[sequence_id]
            num = data.draw(st.integers(0, left))
            if num == 0:
                continue
            missing = -(-(computed[sequence_id] + num) // block_tokens) - len(blocks[sequence_id])
            added, free_blocks = free_blocks[: max(0, missing)], free_blocks[max(0, missing) :]
            blocks[sequence_id] += added
            advances.append(Advance(sequence_id, num, added, sample=num == left))
        built, errors = step(table, advances)
        assert not errors
        if built is None:
            assert not advances
            continue
        check(built, advances, known, blocks, computed, block_tokens)
        for advance in advances:
            computed[advance.sequence_id] += advance.num_tokens
            if advance.sample:
                known[advance.sequence_id].append(7)


def check(
    built: StepBatch,
    advances: list[Advance],
    known: dict[int, list[int]],
    blocks: dict[int, list[int]],
    computed: dict[int, int],
    block_tokens: int,
) -> None:
    """The batch, token by token."""
    token_ids, positions, slots, starts, sample_rows = [], [], [], [0], []
    for advance in advances:
        for position in range(computed[advance.sequence_id], computed[advance.sequence_id] + advance.num_tokens):
            token_ids.append(known[advance.sequence_id][position])
            positions.append(position)
            block = blocks[advance.sequence_id][position // block_tokens]
            slots.append(block * block_tokens + position % block_tokens)
        starts.append(len(token_ids))
        if advance.sample:
            sample_rows.append(len(token_ids) - 1)
    assert built.token_ids.tolist() == token_ids
    assert built.positions.tolist() == positions
    assert built.slots.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert built.query_starts.tolist() == starts
    assert built.sample_rows.tolist() == sample_rows
    contexts = [computed[a.sequence_id] + a.num_tokens for a in advances]
    assert built.context_lens.tolist() == contexts
    assert built.max_context_tokens == max(contexts)
    assert built.max_query_tokens == max(a.num_tokens for a in advances)
    width = -(-max(contexts) // block_tokens)
    expected = [(blocks[a.sequence_id] + [0] * width)[:width] for a in advances]
    assert built.block_tables.tolist() == expected
    assert [t.dtype for t in (built.token_ids, built.positions, built.slots, built.sample_rows)] == [torch.int64] * 4
    assert [t.dtype for t in (built.query_starts, built.context_lens, built.block_tables)] == [torch.int32] * 3


def test_a_freed_row_keeps_no_blocks_for_its_next_sequence() -> None:
    table = new_table(rows=1)
    table.add(NewSequence(1, [1] * 12, 12, 0, [9, 8, 7]))
    table.free(1)
    table.add(NewSequence(2, [2], 1, 0, [5]))
    table.add(NewSequence(3, [3] * 9, 9, 0, [1, 2, 3]))
    built, _ = step(table, [Advance(2, 1, sample=True), Advance(3, 9, sample=True)])
    assert built is not None
    assert built.block_tables.tolist() == [[5, 0, 0], [1, 2, 3]]


def test_more_sequences_than_rows_keep_everything() -> None:
    table = new_table(rows=1)
    for sequence_id in range(9):
        table.add(NewSequence(sequence_id, [sequence_id] * 3, 3, 0, [sequence_id], Sampling(seed=sequence_id)))
    built, errors = step(table, [Advance(sequence_id, 3, sample=True) for sequence_id in range(9)])
    assert not errors
    assert built is not None
    assert built.token_ids.tolist() == [sequence_id for sequence_id in range(9) for _ in range(3)]
    assert table.sampling["seed"][table.rows(range(9))].tolist() == list(range(9))


def test_cached_tokens_are_not_computed_again() -> None:
    table = new_table()
    table.add(NewSequence(1, list(range(10)), 10, num_computed_tokens=8, block_ids=[3, 4]))
    built, _ = step(table, [Advance(1, 2, [6], sample=True)])
    assert built is not None
    assert built.token_ids.tolist() == [8, 9]
    assert built.slots.tolist() == [24, 25]


BROKEN_ADVANCES = {
    "unknown id": (Advance(99, 1), "unknown sequence id"),
    "no tokens": (Advance(1, 0), "an advance of 0 tokens"),
    "more than known": (Advance(1, 7), "an advance of 7 tokens to 7, but only 6 are known"),
    "blocks too short": (Advance(1, 5), "an advance to 5 tokens, but its blocks hold only 4"),
    "sample too early": (Advance(1, 3, sample=True), "a token is to be sampled after 3 tokens, but 6 are known"),
    "block outside": (Advance(1, 1, [64]), "block id 64 is outside of the pool of 64"),
    "too many blocks": (Advance(1, 1, [1] * 40), "has 41 blocks, at most 26 are allowed"),
}


@pytest.mark.parametrize(("advance", "reason"), BROKEN_ADVANCES.values(), ids=BROKEN_ADVANCES.keys())
def test_a_broken_advance_fails_its_sequence_alone(advance: Advance, reason: str) -> None:
    table = new_table()
    table.add(NewSequence(1, [1] * 6, 6, 0, [10]))
    table.add(NewSequence(2, [2] * 4, 4, 0, [11]))
    built, errors = step(table, [advance, Advance(2, 4, sample=True)])
    assert errors == {advance.sequence_id: reason}
    assert built is not None
    assert built.token_ids.tolist() == [2] * 4
    _, errors = step(table, [Advance(advance.sequence_id, 1)])
    assert errors == {advance.sequence_id: reason}, "the reason stays until the sequence is freed"
    assert table.free(advance.sequence_id) == (advance.sequence_id == 1)
    table.add(NewSequence(advance.sequence_id, [3], 1, 0, [12]))
    _, errors = step(table, [Advance(advance.sequence_id, 1, sample=True)])
    assert not errors, "a freed id may come back"


@pytest.mark.parametrize("second", [Advance(1, 1), Advance(1, 1, [64])], ids=["good", "bad"])
def test_two_advances_of_one_sequence_fail_both(second: Advance) -> None:
    table = new_table()
    table.add(NewSequence(1, [1] * 4, 4, 0, [10]))
    table.add(NewSequence(2, [2] * 4, 4, 0, [11]))
    built, errors = step(table, [Advance(1, 1), Advance(2, 4, sample=True), second])
    assert set(errors) == {1}
    assert built is not None
    assert built.token_ids.tolist() == [2] * 4


BROKEN_SEQUENCES = {
    "empty": (NewSequence(1, [], 0), "has no tokens"),
    "too long": (NewSequence(1, [1] * 101, 101), "has 101 tokens, at most 100 are allowed"),
    "outside": (NewSequence(1, [1, VOCAB], 2), "token id 1000 is outside of the vocabulary of 1000"),
    "prompt": (NewSequence(1, [1], 2), "has 2 prompt tokens among 1 known tokens"),
    "computed": (NewSequence(1, [1], 1, 2, [1]), "has 2 computed tokens, but only 1 are known"),
    "uncovered": (NewSequence(1, [1] * 9, 9, 5, [1]), "has 5 computed tokens in 1 blocks"),
    "block": (NewSequence(1, [1], 1, 0, [64]), "block id 64 is outside of the pool of 64"),
    "temperature": (NewSequence(1, [1], 1, sampling=Sampling(temperature=0)), "temperature is 0, must be above 0"),
    "nan": (NewSequence(1, [1], 1, sampling=Sampling(temperature=float("nan"))), "temperature is nan"),
    "top_p": (NewSequence(1, [1], 1, sampling=Sampling(top_p=1.5)), "top_p is 1.5, must be in (0, 1]"),
    "min_p": (NewSequence(1, [1], 1, sampling=Sampling(min_p=-1)), "min_p is -1, must be in [0, 1]"),
    "penalty": (NewSequence(1, [1], 1, sampling=Sampling(repetition_penalty=0)), "repetition_penalty is 0, must be"),
    "stop": (
        NewSequence(1, [1], 1, sampling=Sampling(grammar=Grammar("regex", "a"), stop_token_ids=(1000,))),
        "logit_bias or stop_token_ids name token 1000, outside of the vocabulary of 1000",
    ),
}


@pytest.mark.parametrize(("new", "reason"), BROKEN_SEQUENCES.values(), ids=BROKEN_SEQUENCES.keys())
def test_an_unacceptable_sequence_is_reported_at_its_advance(new: NewSequence, reason: str) -> None:
    table = new_table()
    table.add(new)
    table.add(NewSequence(2, [2], 1, 0, [11]))
    built, errors = step(table, [Advance(1, 1, [3]), Advance(2, 1, sample=True)])
    assert list(errors) == [1]
    assert errors[1].startswith(reason)
    assert built is not None
    assert built.token_ids.tolist() == [2]


def test_an_id_in_use_cannot_be_added_again() -> None:
    table = new_table()
    table.add(NewSequence(1, [1], 1, 0, [1]))
    table.add(NewSequence(1, [2], 1, 0, [2]))
    _, errors = step(table, [Advance(1, 1)])
    assert errors == {1: "sequence id is already in use"}


def test_a_sequence_stops_at_its_longest_length() -> None:
    table = new_table(max_sequence_tokens=8)
    table.add(NewSequence(1, [1] * 8, 8, 0, [1, 2, 3]))
    _, errors = step(table, [Advance(1, 8, sample=True)])
    assert not errors, "the token after the last place is still sampled"
    _, errors = step(table, [Advance(1, 1, sample=True)])
    assert errors == {1: "would have 9 tokens, at most 8 are allowed"}
