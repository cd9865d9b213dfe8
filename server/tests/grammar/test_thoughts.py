"""Limits of thoughts: where the tokens that end them are forced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_server.errors import PlanError
from penstock_server.grammar.thoughts import Thoughts
from penstock_server.pb import worker_pb2 as pb
from penstock_server.protocol.grammar import ThoughtLimit
from penstock_server.protocol.message import grammar_of
from penstock_server.protocol.plan import Grammar

TOKENS = ["a", " b", "\n", "<think>", "</think>", "<", "/think", ">", "é"[:1], "final:", "<end>"]
OPEN, CLOSE = "<think>", "</think>"
END_IDS = (4, 2)


def decode(token_id: int) -> bytes:
    return TOKENS[token_id].encode()


def run(limit: ThoughtLimit, wanted: list[int]) -> str:
    """The text of a model that wants these tokens. Forced tokens come between them."""
    thoughts, text, left = Thoughts(limit, decode, []), "", list(wanted)
    while left:
        must = thoughts.forced()
        token_id = must[0] if must else left.pop(0)
        thoughts.push(token_id)
        text += TOKENS[token_id]
    return text


@pytest.mark.parametrize(
    ("open_", "max_tokens", "wanted", "text"),
    [
        ("", 0, [0, 0], "</think>\naa"),
        ("", 2, [0, 1, 0, 0], "a b</think>\naa"),
        ("", 2, [0, 4, 0, 0, 0], "a</think>aaa"),  # ended before
        ("", 2, [0, 1, 4, 0], "a b</think>\n</think>a"),  # the model's own end comes too late
        (OPEN, 1, [3, 0, 0, 0], "<think>a</think>\naa"),
        (OPEN, 0, [2, 3, 0, 0], "\n<think></think>\naa"),
        (OPEN, 1, [0, 3, 0, 0], "a<think>aa"),  # no thoughts, but text
        (OPEN, 1, [4, 3, 0, 0], "</think><think>aa"),
        ("", 4, [5, 6, 7, 0, 0, 0, 0], "</think>aaaa"),  # the marker in several tokens
        ("", 2, [5, 6, 7, 0], "</think</think>\n>a"),
    ],
)
def test_thoughts_end_after_their_tokens(open_: str, max_tokens: int, wanted: list[int], text: str) -> None:
    assert run(ThoughtLimit(max_tokens, open_, CLOSE, END_IDS), wanted) == text


@pytest.mark.parametrize(
    ("text", "ends_characters", "num_tokens"),
    [("ab😀c", False, 3), ("ab😀c", True, 6), ("aé", True, 3), ("abc", True, 3), ("ab€", True, 5)],
)
def test_in_a_grammar_thoughts_end_after_a_character(text: str, ends_characters: bool, num_tokens: int) -> None:
    limit = ThoughtLimit(3, "", CLOSE, END_IDS)
    thoughts = Thoughts(limit, lambda byte: bytes([byte]), [], ends_characters=ends_characters)
    for place, byte in enumerate(text.encode()):
        assert bool(thoughts.forced()) == (place >= num_tokens)
        if not thoughts.forced():
            thoughts.push(byte)


def test_bytes_that_are_no_characters_end_nevertheless() -> None:
    thoughts = Thoughts(ThoughtLimit(1, "", CLOSE, END_IDS), lambda _: b"\xf0", [0, 0, 0, 0], ends_characters=True)
    assert thoughts.forced()


def test_thoughts_that_begin_again_count_together() -> None:
    limit = ThoughtLimit(2, OPEN, "<end>", (10, 9), reopens=True)
    assert run(limit, [3, 0, 10, 0, 3, 0, 0, 3, 0]) == "<think>a<end>a<think>a<end>final:a<think><end>final:a"


@given(st.lists(st.integers(0, len(TOKENS) - 1)), st.integers(0, 5), st.sampled_from(["", OPEN]), st.booleans())
def test_the_state_is_a_function_of_the_tokens(ids: list[int], max_tokens: int, open_: str, reopens: bool) -> None:
    limit = ThoughtLimit(max_tokens, open_ or (OPEN if reopens else ""), CLOSE, END_IDS, reopens)
    thoughts = Thoughts(limit, decode, [])
    for place, token_id in enumerate(ids):
        copied = thoughts.copy()
        copied.push(4)
        must = thoughts.forced()
        thoughts.push(must[0] if must else token_id)
        ids[place] = must[0] if must else token_id
        assert Thoughts(limit, decode, ids[: place + 1]).forced() == thoughts.forced()


def test_a_limit_is_read_from_its_message() -> None:
    limit = pb.ThoughtLimit(max_tokens=3, open=OPEN, close=CLOSE, end_ids=[7, 8])
    expected = ThoughtLimit(3, OPEN, CLOSE, (7, 8))
    assert grammar_of(pb.Grammar(thoughts=limit)) == Grammar("any", "", expected)
    assert grammar_of(pb.Grammar(regex="a", thoughts=limit)) == Grammar("regex", "a", expected)
    assert grammar_of(pb.Grammar()) is None
    with pytest.raises(PlanError, match="limit of thoughts"):
        grammar_of(pb.Grammar(thoughts=pb.ThoughtLimit(max_tokens=3, close=CLOSE)))
