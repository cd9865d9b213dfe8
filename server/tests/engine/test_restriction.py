"""Allowed tokens and bad words: as transformers' processors have them, in any batch, and together with grammars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from grammar_driver import BLOCK_TOKENS, AnswerDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine import Engine
from penstock_server.engine.restriction import NOTHING_LEFT, Restriction, refusal
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Grammar, Sampling
from transformers.generation import logits_process as hf

EOS = 2
VOCAB = 40  # not a multiple of 32


def bits(token_ids: Sequence[int]) -> bytes:
    is_allowed = np.zeros(max(token_ids) + 1, np.bool_)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").tobytes()


def allowed_after(sampling: Sampling, generated: Sequence[int], vocab: int = VOCAB) -> set[int]:
    restriction = Restriction(sampling, vocab)
    mask = np.full(-(-vocab // 32), -1, np.int32)
    last = np.array(generated, np.int32)[max(0, len(generated) - restriction.num_read) :]
    restriction.apply(mask, last)
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


TOKENS = st.integers(0, 3)


@given(
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5, unique=True),
    generated=st.lists(TOKENS, max_size=6),
    allowed=st.sets(st.integers(0, VOCAB - 1), max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_masks_are_those_of_transformers(
    bad_words: list[tuple[int, ...]], generated: list[int], allowed: set[int]
) -> None:
    sampling = Sampling(bad_words=bad_words, allowed_tokens=bits(sorted(allowed)) if allowed else b"")
    bans = hf.NoBadWordsLogitsProcessor([list(word) for word in bad_words], eos_token_id=None)
    scores = bans(torch.tensor([generated], dtype=torch.int64), torch.zeros(1, VOCAB))
    expected = set((scores[0] > float("-inf")).nonzero()[:, 0].tolist()) & (allowed or set(range(VOCAB)))
    assert allowed_after(sampling, generated) == expected


def test_a_grammar_ends_although_the_end_is_not_allowed() -> None:
    free = Sampling(allowed_tokens=bits([3, 4]), stop_token_ids=(EOS,))
    assert allowed_after(free, []) == {3, 4}
    assert allowed_after(replace(free, grammar=Grammar("regex", "a")), []) == {2, 3, 4}


def test_what_names_no_token_is_refused() -> None:
    for sampling, reason in (
        (Sampling(allowed_tokens=b"\0\0"), "allowed_tokens allow no token"),
        (Sampling(allowed_tokens=bits([VOCAB])), "allowed_tokens name token 40, outside of the vocabulary of 40"),
        (Sampling(bad_words=((1,), ())), "bad_words have one without tokens"),
        (Sampling(bad_words=((1, VOCAB),)), "bad_words name token 40, outside of the vocabulary of 40"),
        (Sampling(allowed_tokens=bits([VOCAB - 1]) + b"\0", bad_words=((0, VOCAB - 1),)), ""),
    ):
        assert refusal(sampling, VOCAB) == reason


@pytest.fixture(scope="module")
def driver(embedded_folder: Path) -> Iterator[AnswerDriver]:
    engine, _ = Engine.load(LoadConfig(embedded_folder, BLOCK_TOKENS, dtype="bfloat16", device="cpu"))
    engine.warm_up(WarmUpConfig(512, 12, 512, num_blocks=16 * 12))
    yield AnswerDriver(engine, (EOS,), num_blocks=16 * 12)
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(embedded_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(embedded_folder)


def test_no_batch_chunk_or_preemption_changes_a_token(driver: AnswerDriver, tokenizer: Any) -> None:
    prompt = tokenizer("Once upon a time, there was a little")["input_ids"]
    (free,) = driver.run([(prompt, Sampling())], max_tokens=24)
    favourites = [tuple(free.tokens[at : at + 2]) for at in range(0, 24, 2)]
    allowed = [token for token in range(300, 3000) if token % 3]
    restricted = [
        Sampling(bad_words=favourites),
        Sampling(bad_words=[(token,) for token in set(free.tokens)]),
        Sampling(allowed_tokens=bits(allowed), do_sample=True, seed=3),
        Sampling(allowed_tokens=bits(allowed), bad_words=[(token,) for token in allowed[::2]], do_sample=True, seed=5),
        Sampling(grammar=Grammar("regex", "[a-z ]+"), stop_token_ids=(EOS,), bad_words=favourites),
        Sampling(),
    ]
    alone = [driver.run([(prompt, sampling)], max_tokens=24)[0].tokens for sampling in restricted]
    assert alone[-1] == free.tokens
    pairs = set(zip(alone[0], alone[0][1:], strict=False))
    assert pairs.isdisjoint(favourites)
    assert alone[0] != free.tokens
    assert set(alone[1]).isdisjoint(free.tokens)
    assert set(alone[2]) <= set(allowed)
    assert set(alone[3]) <= set(allowed) - set(allowed[::2])
    for options in ({}, {"chunk_tokens": 3}, {"preempt_every": 5}):
        together = driver.run([(prompt, sampling) for sampling in restricted], max_tokens=24, **options)
        assert [answer.tokens for answer in together] == alone, options


def test_a_sequence_without_a_token_fails_alone(driver: AnswerDriver, tokenizer: Any) -> None:
    prompt = tokenizer("Hello")["input_ids"]
    grammar = Grammar("regex", "(yes|no)")
    digits = bits(tokenizer("7", add_special_tokens=False)["input_ids"])
    nothing = [
        Sampling(grammar=grammar, stop_token_ids=(EOS,), allowed_tokens=digits),
        Sampling(allowed_tokens=bits([9]), bad_words=[(9,)]),
        Sampling(allowed_tokens=bits([9]), bad_words=[(9,)], do_sample=True),
    ]
    ends = Sampling(grammar=Grammar("regex", "7+"), stop_token_ids=(EOS,), allowed_tokens=digits)
    answers = driver.run([(prompt, sampling) for sampling in (*nothing, ends, Sampling())], max_tokens=8)
    assert [answer.error for answer in answers] == [NOTHING_LEFT] * 3 + ["", ""]
    assert set(answers[3].tokens) <= {*tokenizer("7", add_special_tokens=False)["input_ids"], EOS}
    assert answers[4].tokens == driver.run([(prompt, Sampling())], max_tokens=8)[0].tokens
