"""Converts tiktoken rank files to `tokenizer.json`.

Each line holds a token's bytes in base64 and its rank, which is its id. The merges follow from the ranks. The split
pattern and the special tokens are defined by the code of the tokenizer's class. Here they are data; other classes are
refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import KIMI, LLAMA3, QWEN2, byte_level_json, byte_spelling
from penstock_server.tokenizer.layout import AddedToken
from penstock_server.tokenizer.settings import Settings, Style, read_text

LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")


@dataclass(frozen=True, slots=True)
class Class:
    """What a tokenizer class adds to such a vocabulary."""

    style: Style
    special: tuple[str, ...] = ()  # appended to the vocabulary; {id} stands for the token's id. Files may name others


QWEN = Class(
    Style(defaults=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")), pre_tokenizer=QWEN2),
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
)
# By the tokenizer's class or the model type.
CLASSES = {
    "QWenTokenizer": QWEN,
    "TikTokenTokenizer": Class(Style(pre_tokenizer=KIMI), ("<|reserved_token_{id}|>",) * 256),  # Kimi, Moonlight
    "llama": Class(Style(prefix=("bos_token",), pre_tokenizer=LLAMA3)),
    "qwen": QWEN,
}


def is_rank_file(path: Path) -> bool:
    """Whether the first line is one of a rank file. SentencePiece files may have the same name."""
    with path.open("rb") as file:
        return LINE.match(file.readline(4096)) is not None


def tiktoken_json(path: Path, settings: Settings) -> dict[str, Any]:
    """Builds `tokenizer.json`. Raises ConfigError when the file is damaged or its class or special tokens unknown."""
    class_ = CLASSES.get(settings.class_name) or CLASSES.get(settings.model_type)
    if class_ is None:
        raise ConfigError(
            f"{path} is a tiktoken rank file, and the split pattern of {settings.class_name or 'its class'} is not "
            f"known; known: {', '.join(CLASSES)}; add a tokenizer.json to the folder"
        )
    ranks = read_ranks(path)
    names = [text.format(id=len(ranks) + index) for index, text in enumerate(class_.special)]
    special = {len(ranks) + index: text for index, text in enumerate(names)}
    special |= {id_: entry["content"] for id_, entry in settings.added.items()}
    if not special:
        raise ConfigError(f"{path} holds no special tokens, and tokenizer_config.json has no added_tokens_decoder")
    vocabulary, merges = vocabulary_and_merges(ranks)
    parts = byte_level_json(vocabulary, merges, replace(class_.style.pre_tokenizer, ignore_merges=True))
    whole = [AddedToken(id_, text, special=True) for id_, text in special.items()]
    return replace(settings, style=class_.style).complete(parts, vocabulary, whole)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Reads token bytes → rank. Raises ConfigError when a line is damaged or a byte has no token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line:
            continue
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{path} is damaged: line {number}, {line!r}, is not a token and a rank") from error
    check_ranks(path, ranks)
    return ranks


def check_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Raises ConfigError when a byte has no token or two tokens have the same rank."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{path} is damaged: {len(missing)} bytes have no token, for example {missing[0]:#04x}")
    if len(set(ranks.values())) != len(ranks):
        raise ConfigError(f"{path} is damaged: two tokens have the same rank")


def vocabulary_and_merges(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[list[str]]]:
    """Returns the vocabulary in GPT-2's spelling, and all pairs of tokens that join to a third, by its rank."""
    spelling = byte_spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:index], token[index:]) for index in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[spelled[left], spelled[right]] for left, right in pairs]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges
