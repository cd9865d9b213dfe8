"""Helpers for grammar tests without a model: a small vocabulary, and random walks through masks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

LETTERS = "ab01"
WORDS = [*LETTERS, "aa", "ab", "ba", "01", "10", "aab", "ba1", "0101"]
END, OTHER_END = len(WORDS), len(WORDS) + 1


# A regular expression and all texts that it matches.
Language = tuple[str, frozenset[str]]


def languages(*words: str) -> st.SearchStrategy[Language]:
    """Small languages over these words."""
    leaf = st.sampled_from(words).map(lambda text: (text, frozenset([text])))

    def grow(inner: st.SearchStrategy[Language]) -> st.SearchStrategy[Language]:
        pairs = st.tuples(inner, inner)
        either = pairs.map(lambda p: (f"({p[0][0]}|{p[1][0]})", p[0][1] | p[1][1]))
        both = pairs.map(lambda p: (p[0][0] + p[1][0], frozenset(x + y for x in p[0][1] for y in p[1][1])))
        maybe = inner.map(lambda one: (f"({one[0]})?", one[1] | {""}))
        twice = inner.map(lambda one: (f"({one[0]}){{1,2}}", one[1] | {x + y for x in one[1] for y in one[1]}))
        return st.one_of(either, both, maybe, twice)

    return st.recursive(leaf, grow, max_leaves=6).filter(lambda language: len(language[1]) < 400)


def write_small_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE of WORDS and two special tokens."""
    vocab = {word: token_id for token_id, word in enumerate(WORDS)}
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": END, "content": "<end>", **special}, {"id": OTHER_END, "content": "<other>", **special}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = ["a a", "a b", "b a", "0 1", "1 0", "aa b", "ba 1", "01 01"]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))


def allowed(matcher: LLMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(vocabulary: LLTokenizer, first: LLMatcher, rng: random.Random, num_free: int = 40, limit: int = 600) -> str:
    """A random text that the masks allow: `num_free` uniformly chosen tokens, then preferably closing tokens."""
    matcher, tokens = first.deep_copy(), []
    closing = {vocabulary.tokenize_str(text)[0] for text in ('"', "}", "]", "@", ".c")}
    ends = set(vocabulary.eos_tokens)
    while len(tokens) < limit:
        possible = allowed(matcher)
        assert possible
        assert not matcher.is_error(), matcher.get_error()
        if possible <= ends or (len(tokens) > num_free and possible & ends):
            return vocabulary.decode_str(tokens)
        if len(tokens) > num_free and possible & closing and rng.random() < 0.8:
            possible &= closing
        tokens.append(rng.choice(sorted(possible - ends)))
        assert matcher.consume_token(tokens[-1])
    raise AssertionError(f"no end after {limit} tokens: {vocabulary.decode_str(tokens)}")


def check_instance(text: str, schema: dict[str, Any]) -> None:
    """Raises when the text is not JSON, or not an instance of the schema, including formats."""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
