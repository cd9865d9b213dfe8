"""tiktoken's rank files → `tokenizer.json`.

A line is a token's bytes in base64 and its rank, which is its id; merges follow from the ranks. How a text is cut, and
what the special tokens are, stands in the code of the tokenizer's class: here it is data, and a class that is not in it
is refused.
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
    """A tokenizer whose vocabulary is such a file."""

    style: Style
    special: tuple[str, ...] = ()  # behind the vocabulary; {id} stands for the token's own. Files may name others


QWEN = Class(
    Style(defaults=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")), cutting=QWEN2),
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
)
# By the class of the tokenizer, or the model's type.
CLASSES = {
    "QWenTokenizer": QWEN,
    "TikTokenTokenizer": Class(Style(cutting=KIMI), ("<|reserved_token_{id}|>",) * 256),  # Kimi, Moonlight
    "llama": Class(Style(before=("bos_token",), cutting=LLAMA3)),
    "qwen": QWEN,
}


def is_rank_file(path: Path) -> bool:
    """Whether it is one by its first line; SentencePiece's files may have the same name."""
    with path.open("rb") as file:
        return LINE.match(file.readline(4096)) is not None


def tiktoken_json(path: Path, settings: Settings) -> dict[str, Any]:
    """Raises ConfigError when the file is damaged, or nothing says how its texts are cut or what its tokens are."""
    class_ = CLASSES.get(settings.class_name) or CLASSES.get(settings.model_type)
    if class_ is None:
        raise ConfigError(
            f"{path} is a rank file of tiktoken, and how {settings.class_name or 'its tokenizer'} cuts a text is not "
            f"known; known: {', '.join(CLASSES)}; give the folder a tokenizer.json"
        )
    ranks = read_ranks(path)
    names = [text.format(id=len(ranks) + index) for index, text in enumerate(class_.special)]
    special = {len(ranks) + index: text for index, text in enumerate(names)}
    special |= {id_: entry["content"] for id_, entry in settings.added.items()}
    if not special:
        raise ConfigError(f"{path} holds no special tokens, and tokenizer_config.json has no added_tokens_decoder")
    vocabulary, merges = vocabulary_and_merges(ranks)
    parts = byte_level_json(vocabulary, merges, replace(class_.style.cutting, ignore_merges=True))
    whole = [AddedToken(id_, text, special=True) for id_, text in special.items()]
    return replace(settings, style=class_.style).complete(parts, vocabulary, whole)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Raises ConfigError when a line is none of such a file, or a byte has no token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line:
            continue
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{path} is damaged: line {number}, {line!r}, is not a token and its rank") from error
    check_ranks(path, ranks)
    return ranks


def check_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{path} is damaged: {len(missing)} bytes have no token, the first of them {missing[0]:#04x}")
    if len(set(ranks.values())) != len(ranks):
        raise ConfigError(f"{path} is damaged: two tokens have the same rank")


def vocabulary_and_merges(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[list[str]]]:
    """Tokens in GPT-2's spelling, and every way to make one of two others, the lowest ranks first."""
    spelling = byte_spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:index], token[index:]) for index in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[spelled[left], spelled[right]] for left, right in pairs]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges
