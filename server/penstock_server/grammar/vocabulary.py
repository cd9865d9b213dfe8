"""The model's vocabulary as llguidance needs it: the bytes of every token, and which of them end a text.

Built once, at load: it holds Python's lock for 0.16 s (49,152 tokens) and would stop the steps for as long later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from penstock_server.errors import GrammarError

# Sets of tokens for which a state says at once that all are allowed: text of a JSON string, by its length.
# PERF: a step's masks of 32 sequences in a schema with short strings: 1.1 ms of CPU time in the median, 2.3 ms with
# llguidance's own choice of lengths (10, 30, any), 4.4 ms with none (EPYC).
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [*(_STRING_CHARACTER + f"{{1,{length}}}" for length in (4, 7, 10, 15, 30)), _STRING_CHARACTER + "+"]


def read_vocabulary(folder: Path, vocab_size: int | None = None) -> LLTokenizer:
    """The vocabulary of a model folder; ids that only the model's logits have are never allowed. vocab_size: how many
    logits there are; None: as many as the tokenizer knows tokens.

    Raises GrammarError when the folder has no tokenizer.json, or one whose tokens are no bytes.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError("this model has no tokenizer.json, so its output cannot be constrained by a grammar")
    eos_ids = [token_id for token_id in _eos_ids(folder) if vocab_size is None or token_id < vocab_size]
    try:
        vocabulary = _build(path, vocab_size, eos_ids)
        named = _eos_text(folder)
        if named:
            ids = vocabulary.tokenize_str(named, parse_special=True)
            has_logit = len(ids) == 1 and (vocab_size is None or ids[0] < vocab_size)
            if has_logit and ids[0] not in vocabulary.eos_tokens:
                vocabulary = _build(path, vocab_size, [*eos_ids, ids[0]])
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer cannot be constrained by a grammar: {error}") from error
    return vocabulary


def _build(path: Path, vocab_size: int | None, eos_ids: list[int]) -> LLTokenizer:
    eos = eos_ids or None  # None: llguidance finds it in the tokenizer
    try:
        return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=eos, slices=_SLICES)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
        # The tokenizer knows tokens that the model has no logits for; masks are cut to the model's width.
        return LLTokenizer(str(path), eos_token=eos, slices=_SLICES)


def _eos_ids(folder: Path) -> list[int]:
    """All that generation_config.json and config.json name, in that order."""
    found: list[int] = []
    config = _read(folder / "config.json")
    for source in (_read(folder / "generation_config.json"), config, config.get("text_config")):
        named = source.get("eos_token_id") if isinstance(source, dict) else None
        for token_id in named if isinstance(named, list) else [named]:
            if isinstance(token_id, int) and token_id >= 0 and token_id not in found:
                found.append(token_id)
    return found


def _eos_text(folder: Path) -> str:
    named = _read(folder / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    return text if isinstance(text, str) else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
