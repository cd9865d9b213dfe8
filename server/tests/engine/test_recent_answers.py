"""Drafts from recent answers of other sequences: which they are, who gets them, and that they change no token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fake_model import BLOCK_TOKENS, FakeModel, continuation
from paired_ranks import CPU, PairedGroup
from penstock_server.engine import Engine
from penstock_server.engine.drafting.interface import Drafter, SentDrafter
from penstock_server.engine.drafting.medusa import MedusaDrafter
from penstock_server.engine.drafting.recent import RecentAnswers, RecentDrafter
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.protocol.plan import NewSequence, StepResult
from plans import Advance, plan
from test_engine import LIMITS, prompt_of
from test_medusa import knowing

TEXT = np.arange(100, 150, dtype=np.int32)


def match(answers: RecentAnswers, salt: int | None, history: list[int], most: int = 4) -> tuple[int, list[int]]:
    num_matched, tokens = answers.match(salt, np.array(history, np.int32), most)
    return num_matched, tokens.tolist()


def test_a_match_ends_with_its_answer() -> None:
    answers = RecentAnswers(1000)
    answers.add(None, TEXT[:10])
    answers.add(None, TEXT[20:30])
    assert match(answers, None, [7, *range(100, 106)]) == (6, [106, 107, 108, 109])
    assert match(answers, None, [*range(100, 109)]) == (9, [109])
    assert match(answers, None, [*range(100, 110)]) == (0, []), "nothing follows"
    assert match(answers, None, [*range(105, 110), 120]) == (1, [121, 122, 123, 124]), "no match spans two answers"
    assert match(answers, None, [5, 6]) == (0, [])


def test_of_equal_matches_the_last_answer_counts() -> None:
    answers = RecentAnswers(1000)
    for last in (1, 2, 3):
        answers.add(None, np.array([50, 51, 52, last, last, last, last], np.int32))
    assert match(answers, None, [50, 51, 52]) == (3, [3, 3, 3, 3])


def test_a_match_at_the_end_of_an_answer_does_not_hide_one_with_a_draft() -> None:
    answers = RecentAnswers(1000)
    answers.add(None, np.array([49, 50, 51, 52, 9, 8], np.int32))
    answers.add(None, np.array([49, 50, 51, 52], np.int32))
    assert match(answers, None, [49, 50, 51, 52]) == (4, [9, 8])


def test_an_answer_that_ends_does_not_hide_the_sequences_own_draft() -> None:
    table = SequenceTable(TableLimits(200, BLOCK_TOKENS, 8, 64, 2))
    drafter = RecentDrafter(1000)
    table.add(NewSequence(1, [1, 2, 3, 4, 5], 1))
    drafter.end(table, [1])
    table.add(NewSequence(2, [4, 5, 77, 1, 2, 3, 4, 5], 8))
    (draft,) = drafter.draft(table, table.rows([2]), np.array([2]))
    assert draft.tolist() == [77, 1]


def test_answers_of_another_salt_are_not_read() -> None:
    answers = RecentAnswers(1000)
    answers.add(1, TEXT)
    assert match(answers, 1, [100, 101])[0] == 2
    for salt in (None, 2):
        assert match(answers, salt, [100, 101]) == (0, [])


def test_the_oldest_tokens_give_way_those_of_idle_salts_first() -> None:
    answers = RecentAnswers(60)
    answers.add(1, TEXT[:20])
    answers.add(2, TEXT[:20])
    answers.add(1, TEXT[20:30])
    answers.add(1, TEXT[30:40])
    assert match(answers, 2, [100, 101]) == (0, []), "its oldest tokens are dropped"
    assert match(answers, 2, [118])[0] == 1
    assert match(answers, 1, [100, 101])[0] == 2
    answers.add(1, TEXT[:50])
    assert match(answers, 2, [118]) == (0, [])
    answers.add(1, np.arange(500, dtype=np.int32))
    assert match(answers, 1, [440, 441])[0] == 1
    assert match(answers, 1, [441, 442])[0] == 2
    answers.clear()
    assert match(answers, 1, [441, 442]) == (0, [])


class Ranks:
    """Two ranks with the same plans, whose tokens must be the same."""

    def __init__(self, recent_answer_tokens: int, drafters: Sequence[Drafter | None] = (None, None)) -> None:
        sent: deque[torch.Tensor] = deque()
        self.engines = [
            Engine(
                FakeModel(),
                PairedGroup(rank, 2, sent=sent),
                CPU,
                BLOCK_TOKENS,
                drafter=drafter,
                recent_answer_tokens=recent_answer_tokens,
            )
            for rank, drafter in enumerate(drafters)
        ]
        for engine in self.engines:
            engine.warm_up(LIMITS)
        self.num_steps = 0
        self.freed: list[int] = []

    def run(self, new: list[NewSequence], advances: list[Advance]) -> StepResult:
        self.num_steps += 1
        result, _ = [engine.step(plan(self.num_steps, self.freed, new, advances)) for engine in self.engines]
        self.freed = []
        caches = [engine.model.caches[0] for engine in self.engines]
        assert (caches[0] == caches[1]).all()
        return result

    def answer(
        self, sequence_id: int, prompt: list[int], num_tokens: int, salt: int | None = None
    ) -> tuple[list[int], int]:
        """The answer, and its number of steps. The next plan frees the sequence."""
        new = NewSequence(sequence_id, prompt, len(prompt), cache_salt=salt)
        result = self.run([new], [Advance(sequence_id, len(prompt), range(8), sample=True)])
        tokens, num_steps = result.sampled.ids.tolist(), 1
        while len(tokens) < num_tokens:
            num_drafts = min(3, num_tokens - len(tokens) - 1)
            result = self.run([], [Advance(sequence_id, 1, sample=True, num_draft_tokens=num_drafts)])
            tokens, num_steps = tokens + result.sampled.ids.tolist(), num_steps + 1
        self.freed = [sequence_id]
        return tokens, num_steps


PROMPT = prompt_of(1, 5)


@pytest.mark.parametrize(("recent_answer_tokens", "num_steps"), [(0, 12), (100, 4)])
def test_an_answer_that_was_given_before_takes_fewer_steps(recent_answer_tokens: int, num_steps: int) -> None:
    ranks = Ranks(recent_answer_tokens)
    expected = continuation(PROMPT, 12)
    assert ranks.answer(1, PROMPT, 12) == (expected, 12)
    # The first token comes with the prompt, then 4 a step: the end of the prompt is part of the match.
    assert ranks.answer(2, PROMPT, 12) == (expected, num_steps)


def test_heads_draft_only_where_recent_answers_do_not() -> None:
    expected = continuation(PROMPT, 12)
    heads = MedusaDrafter(knowing(expected[::-1], 3))  # always wrong
    ranks = Ranks(100, [heads, SentDrafter()])
    assert ranks.answer(1, PROMPT, 12) == (expected, 12)
    assert ranks.answer(2, PROMPT, 12) == (expected, 4)


def test_other_salts_and_other_streams_start_without_answers() -> None:
    ranks = Ranks(100)
    expected = continuation(PROMPT, 12)
    assert ranks.answer(1, PROMPT, 12, salt=1) == (expected, 12)
    assert ranks.answer(2, PROMPT, 12, salt=2) == (expected, 12)
    assert ranks.answer(3, PROMPT, 12) == (expected, 12)
    assert ranks.answer(4, PROMPT, 12, salt=1) == (expected, 4)
    for engine in ranks.engines:
        engine.reset()
    ranks.num_steps, ranks.freed = 0, []
    assert ranks.answer(1, PROMPT, 12, salt=1) == (expected, 12)


def test_an_answer_that_goes_on_otherwise_keeps_its_tokens() -> None:
    ranks = Ranks(100)
    ranks.answer(1, PROMPT, 12)
    other = [*PROMPT[:-1], PROMPT[-1] + 1]
    assert ranks.answer(2, other, 12)[0] == continuation(other, 12)
