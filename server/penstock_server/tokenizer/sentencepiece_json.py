"""Builds the parts of `tokenizer.json` from a SentencePiece vocabulary.

Reference: https://github.com/google/sentencepiece, `sentencepiece_model.proto` and `normalizer.cc`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock_server.tokenizer.byte_level import bpe_model
from penstock_server.tokenizer.layout import AddedToken

SPACE = "▁"
# Types of pieces. GGUF uses the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Special tokens divide a text into parts. "sentencepiece" adds a space before every part, "always" before every part
# that does not begin with one, "first" only before the first part and only if it does not begin with one.
Prefix = Literal["never", "first", "always", "sentencepiece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary."""

    text: str
    score: float
    type: int = NORMAL


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The contents of a SentencePiece model."""

    pieces: list[Piece]
    kind: Literal["bpe", "unigram"]
    byte_fallback: bool
    adds_prefix: bool = True
    removes_extra_spaces: bool = False
    charsmap: bytes = b""  # compiled normalization rules

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token."""
        return next((index for index, piece in enumerate(self.pieces) if piece.type == UNKNOWN), None)


def sentencepiece_json(vocabulary: Vocabulary, prefix: Prefix) -> dict[str, Any]:
    """SentencePiece's own behaviour: the text is not split, so pieces may contain spaces."""
    normalizers = _charsmap(vocabulary)
    if vocabulary.removes_extra_spaces:
        # Only spaces: line ends and tabs are kept.
        normalizers.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    pre_tokenizer: dict[str, Any] | None = None
    if prefix == "sentencepiece":
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    if prefix in ("sentencepiece", "never"):
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    else:
        pre_tokenizer = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prefix, "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix != "never":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": sentencepiece_model(vocabulary),
    }


def t5_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """T5's variant: splits at any whitespace, and drops it."""
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers}
        if (normalizers := _charsmap(vocabulary))
        else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": sentencepiece_model(vocabulary),
    }


def spaced_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """mBART-50's variant: splits at spaces only; several spaces count as one."""
    parts = t5_json(vocabulary)
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    normalizer = {"type": "Sequence", "normalizers": [*_charsmap(vocabulary), spaces]}
    return {**parts, "normalizer": normalizer, "pre_tokenizer": parts["decoder"]}


def _charsmap(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    if not vocabulary.charsmap:
        return []
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(vocabulary.charsmap).decode()}]


def whole_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """The control and user-defined pieces, which are never split."""
    return [
        AddedToken(id_, piece.text, special=piece.type == CONTROL)
        for id_, piece in enumerate(vocabulary.pieces)
        if piece.type in (CONTROL, USER_DEFINED)
    ]


def sentencepiece_model(vocabulary: Vocabulary) -> dict[str, Any]:
    """The model of `tokenizer.json`."""
    if vocabulary.kind == "unigram":
        return {
            "type": "Unigram",
            "unk_id": vocabulary.unknown_id,
            "vocab": [[piece.text, piece.score] for piece in vocabulary.pieces],
            "byte_fallback": vocabulary.byte_fallback,
        }
    ids = {piece.text: index for index, piece in enumerate(vocabulary.pieces)}
    unknown = vocabulary.unknown_id
    return bpe_model(
        ids,
        merges(vocabulary.pieces, ids),
        unk_token=None if unknown is None else vocabulary.pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=vocabulary.byte_fallback,
    )


def merges(pieces: Iterable[Piece], ids: dict[str, int]) -> list[list[str]]:
    """All pairs of pieces that join to a third, in the order of its score, as SentencePiece's BPE merges them."""
    ranked: list[tuple[tuple[float, int, int], list[str]]] = []
    for piece in pieces:
        if piece.type not in (NORMAL, USER_DEFINED):
            continue
        text = piece.text
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append(((-piece.score, ids[text], cut), [left, right]))
    ranked.sort(key=lambda entry: entry[0])
    return [pair for _, pair in ranked]
