"""Byte-level pre-tokenizers: each name that GGUF files use splits as expected, and every text round-trips."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from penstock_server.tokenizer.byte_level import PRE_TOKENIZERS, byte_level_json, byte_spelling
from penstock_server.tokenizer.layout import tokenizer_json
from tokenizers import Tokenizer

TEXTS = json.loads((Path(__file__).parent / "sentencepiece" / "expected.json").read_text(encoding="utf-8"))["texts"]
TEXT = "HI'LL paY12345 ($6) été. 你好カナ\n\n  x=aB'S"
# Read off the patterns in llama.cpp's vocabulary code and the published tokenizer.json files.
PIECES = {
    "gpt-2": "HI|'|LL| paY|12345| ($|6|)| été|.| 你好カナ|\n\n | x|=|aB|'|S",
    "mpt": "HI|'|LL| paY|12345| ($|6|)| été|.| 你好カナ|\n\n | x|=|aB|'|S",
    "starcoder": "HI|'|LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n | x|=|aB|'|S",
    "command-r": "HI|'|LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n | x|=|aB|'|S",
    "llama-bpe": "HI|'LL| paY|123|45| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "dbrx": "HI|'LL| paY|123|45| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "qwen2": "HI|'LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "stablelm2": "HI|'LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "seed-coder": "HI|'LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "tekken": "HI|'LL| pa|Y|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n| | x|=a|B|'S",
    "gpt-4o": "HI'LL| pa|Y|123|45| ($|6|)| été|.| 你好カナ|\n\n| | x|=a|B'S",
    "bloom": "HI'LL| paY12345| (|$6|)| été|.| 你好カナ|\n\n | x=aB'S",
    "viking": "HI'LL| paY|1|2|3|4|5| (|$|6|)| été|.| 你好カナ|\n\n | x=aB'S",
    "falcon": "HI|'|LL| paY|123|45| |($|6|)| été|.| 你好カナ|\n\n | x|=|aB|'|S",
    # Its punctuation pattern contains ASCII letters, so it splits words with other letters.
    "deepseek-llm": "HI|'|LL| paY|1|2|3|4|5| ($|6|)| é|t|é|.| |你好カナ|\n|\n| | x|=|aB|'|S",
    "deepseek-coder": "HI|'|LL| paY|1|2|3|4|5| (|$|6|)| été|.| |你好カナ|\n|\n| | x|=|aB|'|S",
    "kimi-k2": "HI'LL| pa|Y|123|45| ($|6|)| été|.| |你好|カナ|\n\n| | x|=a|B'S",
    "qwen35": "HI|'LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "jais-2": "HI|'LL| paY|123|45| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "bailingmoe": "HI|'LL| paY|1|2|3|4|5| ($|6|)| été|.| 你好カナ|\n\n| | x|=aB|'S",
    "tiny_aya": "HI'LL| pa|Y|12|345| ($|6|)| été|.| 你好カナ|\n\n| | x|=a|B'S",
    "deepseek-v3": "HI|'LL| paY|123|45| ($|6|)| été|.| |你好カナ|\n\n| | x|=aB|'S",
}
SPELLING = byte_spelling()
BYTES = {character: byte for byte, character in SPELLING.items()}


def tokenizer(name: str, merges: list[str] | None = None) -> Tokenizer:
    """A tokenizer of single bytes and the given merges."""
    merges = merges or []
    tokens = [*SPELLING.values(), *(merge.replace(" ", "") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return Tokenizer.from_str(json.dumps(tokenizer_json(byte_level_json(vocabulary, merges, PRE_TOKENIZERS[name]), [])))


@pytest.mark.parametrize("name", PIECES)
def test_each_pre_tokenizer_splits_as_expected(name: str) -> None:
    pieces = tokenizer(name).pre_tokenizer.pre_tokenize_str(TEXT)
    assert "|".join(bytes(BYTES[character] for character in piece).decode() for piece, _ in pieces) == PIECES[name]


def test_every_pre_tokenizer_is_tested() -> None:
    assert {id(PRE_TOKENIZERS[name]) for name in PIECES} == {id(each) for each in PRE_TOKENIZERS.values()}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_text_round_trips(name: str) -> None:
    whole = tokenizer(name, ["Ġ t", "Ġt h", "Ã ©", "ð Ł", "1 2"])
    for text in TEXTS:
        ids = whole.encode(text).ids
        assert whole.decode(ids) == (unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].nfc else text)


def test_ignore_merges_takes_a_whole_word_of_the_vocabulary() -> None:
    merges = ["h e", "l l", "he ll"]
    for name, pieces in (("llama-bpe", ["lo"]), ("qwen2", ["l", "o"])):
        vocabulary = {token: id_ for id_, token in enumerate([*SPELLING.values(), "he", "ll", "hell", "lo"])}
        parts = byte_level_json(vocabulary, merges, PRE_TOKENIZERS[name])
        assert Tokenizer.from_str(json.dumps(tokenizer_json(parts, []))).encode("lo").tokens == pieces
