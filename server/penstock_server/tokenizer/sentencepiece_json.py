"""SentencePiece vocabularies, from its own files or from GGUF → the parts of `tokenizer.json`.

Source: https://github.com/google/sentencepiece, `sentencepiece_model.proto` and `normalizer.cc`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock_server.tokenizer.byte_level import bpe_model
from penstock_server.tokenizer.layout import AddedToken

SPACE = "▁"
# Types of pieces; GGUF has the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# "always": as SentencePiece does, in every part between special tokens. "first": in the first one, and not where the
# text begins with a space, as transformers does.
Prefix = Literal["never", "first", "always", "sentencepiece"]


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    type: int = NORMAL


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a SentencePiece file says."""

    pieces: list[Piece]
    kind: Literal["bpe", "unigram"]
    byte_fallback: bool
    adds_prefix: bool = True
    removes_extra_spaces: bool = False
    charsmap: bytes = b""  # compiled rules of normalization

    @property
    def unknown_id(self) -> int | None:
        return next((index for index, piece in enumerate(self.pieces) if piece.type == UNKNOWN), None)


def sentencepiece_json(vocabulary: Vocabulary, prefix: Prefix) -> dict[str, Any]:
    """A text is one word: pieces may hold spaces anywhere."""
    normalizers = _charsmap(vocabulary)
    if vocabulary.removes_extra_spaces:
        # Spaces only: line ends and tabs stay.
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
    """T5's: word by word; whitespace is nothing but what separates them."""
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
    """mBART-50's: word by word; only spaces separate them, several as one does."""
    parts = t5_json(vocabulary)
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    normalizer = {"type": "Sequence", "normalizers": [*_charsmap(vocabulary), spaces]}
    return {**parts, "normalizer": normalizer, "pre_tokenizer": parts["decoder"]}


def _charsmap(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    if not vocabulary.charsmap:
        return []
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(vocabulary.charsmap).decode()}]


def whole_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """The vocabulary's tokens that no merge may touch."""
    return [
        AddedToken(id_, piece.text, special=piece.type == CONTROL)
        for id_, piece in enumerate(vocabulary.pieces)
        if piece.type in (CONTROL, USER_DEFINED)
    ]


def sentencepiece_model(vocabulary: Vocabulary) -> dict[str, Any]:
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
    """Every way to make a piece of two others, the pieces of the best scores first, as SentencePiece's BPE merges."""
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
