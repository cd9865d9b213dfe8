"""Draft tokens: what is proposed, and what becomes of right, wrong and broken ones."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_model import BLOCK_TOKENS, POISON, FakeModel, continuation
from grammar_walk import WORDS, write_small_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from paired_ranks import CPU, PairedGroup, paired_engines
from penstock_server.engine import Engine, speculation
from penstock_server.engine.batch import select
from penstock_server.engine.drafting import ngram
from penstock_server.engine.drafting.interface import Drafter, Tokens
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.engine.drafting.ngram import NgramDrafter
from penstock_server.engine.drafting.ngram import continuation as draft_of
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.engine.step import BROKEN_LOGITS
from penstock_server.errors import ConfigError, PlanError
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.grammar.state import GRAMMAR_ENDED
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup, Stage
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Grammar, NewSequence, Sampling
from plans import Advance, columns, plan
from test_engine import LIMITS, Driver, prompt_of, ready_engine

NOT_INDEPENDENT = replace(FakeModel.traits, is_row_independent=False)


def draft(history: list[int], most: int) -> list[int]:
    return draft_of(np.array(history, np.int32), most).tolist()


def test_a_draft_is_what_followed_the_longest_match() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 2, 3, 7, 1, 2, 3], 2) == [4, 5]
    assert draft([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 2, 3], 2) == [7, 8]


def test_a_draft_has_as_many_tokens_as_it_may_if_any_match_has() -> None:
    assert draft([1, 2, 3, 4, 1, 2, 5, 1, 2], 5) == [3, 4, 1, 2, 5]
    assert draft([1, 2, 3, 1, 2], 5) == [3, 1, 2]


def test_a_text_without_a_match_of_two_tokens_has_no_draft() -> None:
    for history in ([1], [1, 1], [1, 2, 3, 2], [3, 1, 2, 1]):
        assert draft(history, 4) == []


def test_only_the_end_of_a_long_text_is_searched() -> None:
    history = [1, 2, 3, *range(10, 10 + (1 << 15)), 1, 2]
    assert draft(history, 1) == []
    assert draft(history[-(1 << 15) :] + history[-2:], 1) == [1]


@given(
    text=st.lists(st.integers(0, 2), max_size=80),
    end=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    most=st.integers(1, 6),
    num_few=st.sampled_from([0, 3, 64]),
)
def test_the_longest_match_is_that_of_comparing_all(text: list[int], end: list[int], most: int, num_few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_FEW", num_few)
        num_matched, tokens = ngram.longest_match(np.array(text, np.int32), np.array(end, np.int32), most)

    def places(length: int) -> list[int]:
        return [i for i in range(length, len(text)) if text[i - length : i] == end[-length:]]

    longest = max((n for n in range(1, min(ngram.MAX_MATCH, len(end)) + 1) if places(n)), default=0)
    assert num_matched == longest
    if longest:
        long = [place for place in places(longest) if place + most <= len(text)]
        first = long[-1] if long else places(longest)[0]
        assert tokens.tolist() == text[first : first + most]


class Proposed:
    """Stands for the search: the next draft of every sequence, wherever its text ends."""

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = list(drafts)

    def __call__(self, history: np.ndarray, most: int) -> np.ndarray:
        return np.array(self.drafts.pop(0)[:most], np.int32)


def start(driver: Driver, prompt: list[int], sampling: Sampling | None = None) -> None:
    new = NewSequence(1, prompt, len(prompt), sampling=sampling or Sampling())
    driver.run([Advance(1, len(prompt), range(8), sample=True)], [new])


def propose(monkeypatch: pytest.MonkeyPatch, *drafts: list[int]) -> None:
    monkeypatch.setattr(ngram, "continuation", Proposed(*drafts))


def test_right_drafts_are_kept_up_to_the_first_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, prompt = Driver(ready_engine()), prompt_of(1, 5)
    expected = continuation(prompt, 12)
    start(driver, prompt)
    right, wrong = expected[1:4], [expected[5], 5, expected[7]]
    propose(monkeypatch, right, wrong, [5], [])
    for num_tokens in (4, 2, 1, 1):
        known = len(driver.tokens[1])
        (output,) = driver.run([Advance(1, 1, sample=True, num_draft_tokens=3)])
        assert [token.id for token in output.tokens] == expected[known : known + num_tokens]


def test_a_result_counts_the_drafts_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, prompt = Driver(ready_engine()), prompt_of(1, 5)
    start(driver, prompt)
    propose(monkeypatch, [5, 6])
    result = driver.engine.step(plan(2, advances=[Advance(1, 1, sample=True, num_draft_tokens=3)]))
    assert (result.num_draft_tokens.tolist(), result.sequence_ids.tolist()) == ([2], [1])
    assert result.timing.draft_s == 0.0, "a CPU reports no time for lookups"


def test_a_sequence_fails_at_the_token_at_which_it_fails_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a right draft is broken: the tokens before it count."""
    driver, prompt = Driver(ready_engine()), prompt_of(1, 5)
    allowed = np.zeros(1000, bool)
    allowed[POISON] = True
    sampling = Sampling(allowed_tokens=np.packbits(allowed, bitorder="little").tobytes())
    propose(monkeypatch, [POISON, POISON])
    new = NewSequence(1, prompt, 5, sampling=sampling)
    (output,) = driver.run([Advance(1, 5, range(8), sample=True, num_draft_tokens=2)], [new])
    assert [token.id for token in output.tokens] == [POISON]
    propose(monkeypatch, [])
    (output,) = driver.run([Advance(1, 1, sample=True, num_draft_tokens=2)])
    assert output.error == BROKEN_LOGITS


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_sequence_whose_grammar_has_ended_is_over_without_a_fault(num_draft_tokens: int, tmp_path: Path) -> None:
    """The model has no EOS token, so no token says so. A draft may complete the grammar."""
    write_small_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    compiler = GrammarCompiler(tmp_path, FakeModel.traits.vocab_size)
    engine = Engine(FakeModel(), RankGroup(), CPU, BLOCK_TOKENS, compiler=compiler)
    engine.warm_up(LIMITS)
    compiler.compile(Grammar("regex", "1001"))
    driver = Driver(engine)
    start(driver, prompt_of(1, 5), Sampling(grammar=Grammar("regex", "1001")))
    for _ in range(4):
        (output,) = driver.run([Advance(1, 1, sample=True, num_draft_tokens=num_draft_tokens)])
        if output.error:
            break
    assert (output.error, output.fault) == GRAMMAR_ENDED
    assert "".join(WORDS[token] for token in driver.tokens[1]) == "1001"
    engine.close()


def test_ranks_keep_the_same_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers, prompt = [Driver(engine) for engine in paired_engines(LIMITS)], prompt_of(1, 5)
    expected = continuation(prompt, 8)
    for driver in drivers:
        start(driver, prompt)
        propose(monkeypatch, [*expected[1:3], 5], expected[4:6])
        for _ in range(2):
            driver.run([Advance(1, 1, sample=True, num_draft_tokens=3)])
    assert drivers[0].tokens[1] == expected[:7]
    models = [driver.engine.model for driver in drivers]
    assert all(isinstance(model, FakeModel) for model in models)
    assert torch.equal(models[0].caches[0], models[1].caches[0])


class Allowing:
    """Stands for the grammars of the first rank."""

    def __init__(self, expected: list[int]) -> None:
        self._expected = expected

    def draft(self, sequence_id: int, history: np.ndarray, most: int, guess: object, expected: list[int]) -> list[int]:
        assert (sequence_id, history.tolist(), guess) == (0, [1, 2, 3, 1, 2], draft_of)
        assert expected == self._expected
        return [7, 8, 9, 10][: most - 1]


class Reading(NgramDrafter):
    """Stands for a drafter of heads, which all ranks run."""

    is_lookup = False


class Sending(Reading):
    """Stands for a drafter that only the first rank has."""

    is_sent = True


class Repeating(Sending):
    """Stands for heads that repeat the last token."""

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> list[Tokens]:
        return [table.known_ids(row)[-1:] for row in rows.tolist()]


class Forbidding:
    """Stands for the grammars of the first rank, which force a token of the first sequence only."""

    def draft(self, sequence_id: int, history: np.ndarray, most: int, guess: object, expected: list[int]) -> list[int]:
        return [7] if sequence_id == 0 else expected


def test_heads_draft_where_neither_a_grammar_nor_a_text_does() -> None:
    table = SequenceTable(
        TableLimits(vocab_size=100, block_tokens=16, num_blocks=4, max_sequence_tokens=30, num_rows=4)
    )
    for i, grammar in enumerate((Grammar("regex", "a"), Grammar("regex", "a"), None, None)):
        text = [1, 2, 3, 1, 2] if i == 2 else [1, 2, 3, 4, 5]
        table.add(NewSequence(i, text, 5, 4, [i], Sampling(grammar=grammar)))
    selected = select(table, columns([Advance(i, 1, sample=True, num_draft_tokens=3) for i in range(4)]))
    drafters, grammars = [NgramDrafter(), Repeating()], cast(Any, Forbidding())
    chosen = speculation.with_drafts(table, selected, drafters, grammars, RankGroup(), CPU)
    assert speculation.drafts_of(table, chosen) == [[7], [5], [3, 1, 2], [5]]


@pytest.mark.parametrize(
    ("drafter", "expected"), [(NgramDrafter(), []), (Reading(), [3, 1, 2]), (Sending(), [3, 1, 2])]
)
def test_the_first_rank_sends_the_drafts_that_grammars_allow(drafter: Drafter, expected: list[int]) -> None:
    """Grammars know what a drafter expects; n-grams they look up themselves."""
    sent: deque[torch.Tensor] = deque()
    for rank, grammars in ((0, Allowing(expected)), (1, None)):
        table = SequenceTable(
            TableLimits(vocab_size=100, block_tokens=16, num_blocks=4, max_sequence_tokens=30, num_rows=2)
        )
        for i, grammar in enumerate((Grammar("regex", "a"), None)):
            table.add(NewSequence(i, [1, 2, 3, 1, 2], 5, 4, [i], Sampling(grammar=grammar)))
        advances = [Advance(i, 1, sample=True, num_draft_tokens=3) for i in range(2)]
        group = PairedGroup(rank, 2, sent=sent)
        selected = select(table, columns(advances))
        chosen = speculation.with_drafts(table, selected, [drafter], cast(Any, grammars), group, CPU)
        assert chosen.num_drafts.tolist() == [2, 3]
        assert (chosen.num_tokens.tolist(), chosen.samples.tolist()) == ([3, 4], [0, 0, 0, 1, 1, 1, 1])
        assert speculation.drafts_of(table, chosen) == [[7, 8], [3, 1, 2]]


def test_ranks_whose_heads_may_compute_other_bits_take_the_drafts_of_the_first() -> None:
    sent, found = deque[torch.Tensor](), []
    for rank, texts in ((0, [1, 2, 3, 1, 2]), (1, [1, 2, 4, 1, 2])):
        table = SequenceTable(
            TableLimits(vocab_size=100, block_tokens=16, num_blocks=4, max_sequence_tokens=30, num_rows=2)
        )
        table.add(NewSequence(0, texts, 5, 4, [0]))
        selected = select(table, columns([Advance(0, 1, sample=True, num_draft_tokens=1)]))
        group = PairedGroup(rank, 2, computes_alike=False, sent=sent)
        chosen = speculation.with_drafts(table, selected, [Reading()], None, group, CPU)
        found.append(speculation.drafts_of(table, chosen))
    assert found == [[[3]]] * 2


class Forcing:
    def forced(self, sequence_id: int, most: int) -> list[int]:
        assert sequence_id == 0
        return [7, 8, 9, 10][:most]


def test_forced_tokens_are_the_only_drafts_if_the_plan_says_so() -> None:
    sent: deque[torch.Tensor] = deque()
    for rank, grammars in ((0, Forcing()), (1, None)):
        table = SequenceTable(
            TableLimits(vocab_size=100, block_tokens=16, num_blocks=4, max_sequence_tokens=30, num_rows=2)
        )
        for i, grammar in enumerate((Grammar("regex", "a"), None)):
            table.add(NewSequence(i, [1, 2, 3, 1, 2], 5, 4, [i], Sampling(grammar=grammar)))
        selected = select(table, columns([Advance(i, 1, sample=True, num_draft_tokens=3) for i in range(2)]))
        group = PairedGroup(rank, 2, sent=sent)
        chosen = speculation.with_forced_tokens(table, selected, cast(Any, grammars), group, CPU)
        assert chosen.num_drafts.tolist() == [3, 0]
        assert speculation.drafts_of(table, chosen) == [[7, 8, 9], []]


@pytest.mark.parametrize(
    ("advance", "reason"),
    [
        (Advance(1, 1, num_draft_tokens=2), "2 draft tokens, but without a sample"),
        (Advance(1, 1, sample=True, num_draft_tokens=40), "40 draft tokens, which do not fit into 32 slots"),
    ],
)
def test_an_advance_with_too_many_drafts_fails(advance: Advance, reason: str) -> None:
    driver = Driver(ready_engine(LIMITS_OF_MANY))
    start(driver, prompt_of(1, 5))
    (output,) = driver.run([advance])
    assert reason in output.error


LIMITS_OF_MANY = WarmUpConfig(max_step_tokens=64, max_step_sequences=64, num_blocks=40)


def test_a_plan_with_too_many_drafts_is_refused() -> None:
    driver = Driver(ready_engine())
    start(driver, prompt_of(1, 5))
    with pytest.raises(PlanError, match="1 advances and 8 draft tokens, at most 8 are allowed"):
        driver.run([Advance(1, 1, sample=True, num_draft_tokens=8)])


@pytest.mark.parametrize(
    ("attributes", "num_stages", "reason"),
    [
        ({"pooler": object()}, 1, "fake generates no tokens"),
        ({}, 2, "the model has 2 pipeline stages; leave the flag out, or --pipeline-parallel-size"),
        ({"traits": NOT_INDEPENDENT}, 1, "fake runs on transformers; leave the flag out"),
    ],
)
def test_a_drafter_that_cannot_be_used_is_refused_with_the_reason(
    attributes: dict[str, Any], num_stages: int, reason: str
) -> None:
    model = FakeModel()
    for name, value in attributes.items():
        setattr(model, name, value)
    options = LoadOptions(Path("nowhere"), torch.float32, CPU, BLOCK_TOKENS)
    with pytest.raises(ConfigError, match=f"--speculative-model heads: no drafts are verified here, because {reason}"):
        load_drafter(Path("heads"), model, options, load_model, RankGroup(stage=Stage(0, num_stages)))


def test_a_model_whose_rows_depend_on_the_batch_verifies_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModel, "traits", NOT_INDEPENDENT)
    driver = Driver(ready_engine())
    start(driver, prompt_of(1, 5))
    with pytest.raises(PlanError, match="the model verifies none here"):
        driver.run([Advance(1, 1, sample=True, num_draft_tokens=2)])
