"""The model's vocabulary for llguidance: the bytes of each token and the EOS tokens.

Reading it and preparing its sets holds Python's GIL, for 0.36 s with 49,152 tokens (EPYC).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from penstock_server.errors import GrammarError
from penstock_server.grammar.metaspace import FirstTokens, Metaspace

# Sets of tokens that a grammar state can allow as a whole: text within a JSON string, by length.
# PERF: the masks of 32 sequences in a schema with short strings take 1.1 ms of CPU time (median), 2.3 ms with
# llguidance's default lengths (10, 30, any) and 4.4 ms without such sets (EPYC).
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [*(_STRING_CHARACTER + f"{{1,{length}}}" for length in (4, 7, 10, 15, 30)), _STRING_CHARACTER + "+"]
_END = "<|end of a grammar|>"  # an additional token, for models without EOS tokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model."""

    tokenizer: LLTokenizer  # tokens as they decode in the middle of a text
    eos_ids: tuple[int, ...] = ()  # EOS tokens of the model; the tokenizer has an EOS token even if there are none
    first_tokens: FirstTokens | None = None  # None: the first token of an output decodes in the same way
    never_ids: tuple[int, ...] = ()  # tokens that are never allowed


def read_vocabulary(folder: Path, vocab_size: int | None = None) -> Vocabulary:
    """Reads the vocabulary of a model folder. Ids without a token are never allowed.

    vocab_size: the number of logits; None: the number of tokens. See `fast_vocabulary` and `small_vocabulary`.
    Raises GrammarError when the folder has no tokenizer.json, or its tokens cannot be mapped to bytes.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError("this model has no tokenizer.json, so its output cannot be constrained by a grammar")
    metaspace = Metaspace.read(path)
    source = str(path) if metaspace is None else metaspace.readable()
    eos_ids = [token_id for token_id in _eos_ids(folder) if vocab_size is None or token_id < vocab_size]
    never_ids = []
    try:
        tokenizer = _build(source, vocab_size, eos_ids)
        named = _eos_text(folder)
        if named:
            ids = tokenizer.tokenize_str(named, parse_special=True)
            has_logit = len(ids) == 1 and (vocab_size is None or ids[0] < vocab_size)
            if has_logit and ids[0] not in eos_ids:
                eos_ids.append(ids[0])
                tokenizer = _build(source, vocab_size, eos_ids)
        if not eos_ids:
            # llguidance takes token 0 if it is given no EOS token: so an additional one, which is never allowed.
            source, before = _with_end(source), tokenizer.tokenize_str(_END, parse_special=True)
            never_ids = _build(source, vocab_size, []).tokenize_str(_END, parse_special=True)
            if len(never_ids) != 1 or never_ids == before:
                raise GrammarError(
                    "this model has no EOS token, and its tokenizer takes no further one, so its output cannot be "
                    "constrained by a grammar; give the model's folder a generation_config.json with its eos_token_id"
                )
            tokenizer = _build(source, vocab_size, never_ids)
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer cannot be constrained by a grammar: {error}") from error
    if metaspace is None:
        return Vocabulary(tokenizer, tuple(eos_ids), never_ids=tuple(never_ids))
    # In a decoder-only model the output continues the prompt, so its first token keeps its space.
    begins_texts = bool(_read(folder / "config.json").get("is_encoder_decoder"))
    first_tokens = metaspace.first_tokens(tokenizer.vocab_size) if begins_texts else None
    if metaspace.unknown_id is not None:
        never_ids.append(metaspace.unknown_id)
    return Vocabulary(tokenizer, tuple(eos_ids), first_tokens, tuple(never_ids))


def fast_vocabulary(vocabulary: Vocabulary) -> Vocabulary:
    """The same tokens with the sets that make masks faster, in twice the memory."""
    return replace(vocabulary, tokenizer=vocabulary.tokenizer.with_slices(_SLICES))


def small_vocabulary(vocabulary: Vocabulary) -> Vocabulary:
    """The same tokens in a fifth of the memory. Masks take longer to compute, and where only one text remains, they
    allow its greedy tokenization, not the model's."""
    tokens = _Tokens(vocabulary.tokenizer)
    tokenizer = LLTokenizer(tokens, eos_token=vocabulary.tokenizer.eos_tokens, slices=[])
    tokens.tokenizer, tokens.tokens = tokenizer, ()
    return replace(vocabulary, tokenizer=tokenizer)


class _Tokens(TokenizerWrapper):
    """What llguidance reads of a tokenizer that is not its own."""

    def __init__(self, source: LLTokenizer) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id = source.eos_token
        self.bos_token_id = None
        self.tokens = [source.decode_bytes([token_id]) for token_id in range(source.vocab_size)]
        self.special_token_ids = [
            token_id for token_id in range(source.vocab_size) if source.is_special_token(token_id)
        ]
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.greedy_tokenize(text)


def _build(source: str, vocab_size: int | None, eos_ids: list[int]) -> LLTokenizer:
    """source: the path or the content of a tokenizer.json."""
    eos = eos_ids or None  # None: llguidance finds it itself
    try:
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=eos, slices=[])
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
        # The tokenizer has more tokens than the model has logits. Masks are cut to the number of logits.
        return LLTokenizer(source, eos_token=eos, slices=[])


def _with_end(source: str) -> str:
    """The content of a tokenizer.json with one more special token."""
    content = json.loads(source if source.startswith("{") else Path(source).read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    # The id is that of the next token, whatever is written here.
    end = {"id": len(content["model"]["vocab"]), "content": _END, "special": True, **flags}
    return json.dumps({**content, "added_tokens": [*(content.get("added_tokens") or ()), end]})


def _eos_ids(folder: Path) -> list[int]:
    """The EOS ids of generation_config.json, or else of config.json: those at which the router ends an output. If a
    grammar ended with another one, the output would go on behind it."""
    config = _read(folder / "config.json")
    for source in (_read(folder / "generation_config.json"), config, config.get("text_config")):
        named = source.get("eos_token_id") if isinstance(source, dict) else None
        listed = named if isinstance(named, list) else [named]
        # Some tools write an id as 2.0.
        numbers = [number for number in listed if isinstance(number, int | float) and number >= 0]
        if found := [int(number) for number in numbers if number == int(number)]:
            return list(dict.fromkeys(found))
    return []


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
