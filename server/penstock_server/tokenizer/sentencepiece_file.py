"""Reads SentencePiece model files, which are protocol buffers: only the few fields that the conversion needs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.sentencepiece_json import NORMAL, Piece, Vocabulary

# Numbers of fields in sentencepiece_model.proto.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
TRAINER_MODEL_TYPE, TRAINER_BYTE_FALLBACK = 3, 35
NORMALIZER_CHARSMAP, NORMALIZER_ADDS_PREFIX, NORMALIZER_REMOVES_SPACES = 2, 3, 4
KINDS: dict[int, Literal["bpe", "unigram"]] = {1: "unigram", 2: "bpe"}


def read_sentencepiece(path: Path) -> Vocabulary:
    """Raises ConfigError when the file is not a SentencePiece model, or is one of words or characters."""
    data = path.read_bytes()
    try:
        fields = list(_fields(data))
        pieces = [_piece(value) for number, value in fields if number == PIECES and isinstance(value, bytes)]
        trainer, normalizer = _message(fields, TRAINER), _message(fields, NORMALIZER)
    except (IndexError, struct.error, ValueError) as error:
        raise ConfigError(f"{path} is damaged or not a SentencePiece model: {error}") from error
    if not pieces:
        raise ConfigError(f"{path} is not a SentencePiece model: it holds no pieces")
    kind = KINDS.get(int(trainer.get(TRAINER_MODEL_TYPE, 1)))
    if kind is None:
        raise ConfigError(f"{path} is a SentencePiece model of words or characters; only unigram and BPE are supported")
    charsmap = normalizer.get(NORMALIZER_CHARSMAP, b"")
    assert isinstance(charsmap, bytes)
    return Vocabulary(
        pieces,
        kind,
        byte_fallback=bool(trainer.get(TRAINER_BYTE_FALLBACK, 0)),
        adds_prefix=bool(normalizer.get(NORMALIZER_ADDS_PREFIX, 1)),
        removes_extra_spaces=bool(normalizer.get(NORMALIZER_REMOVES_SPACES, 1)),
        charsmap=charsmap,
    )


def _piece(data: bytes) -> Piece:
    values = dict(_fields(data))
    text, score, type_ = values[PIECE_TEXT], values.get(PIECE_SCORE, 0.0), values.get(PIECE_TYPE, NORMAL)
    if not isinstance(text, bytes) or isinstance(score, bytes) or not isinstance(type_, int):
        raise ValueError("a piece has fields of wrong types")
    return Piece(text.decode(), float(score), type_)


def _message(fields: list[tuple[int, int | float | bytes]], number: int) -> dict[int, int | float | bytes]:
    for found, value in fields:
        if found == number and isinstance(value, bytes):
            return dict(_fields(value))
    return {}


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the number and value of each field of a message."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, offset = _varint(data, offset)
            yield number, value
        elif wire_type == 1:
            yield number, struct.unpack_from("<d", data, offset)[0]
            offset += 8
        elif wire_type == 2:
            size, offset = _varint(data, offset)
            if offset + size > len(data):
                raise ValueError("the file ends inside a field")
            yield number, data[offset : offset + size]
            offset += size
        elif wire_type == 5:
            yield number, struct.unpack_from("<f", data, offset)[0]
            offset += 4
        else:
            raise ValueError(f"unknown wire type {wire_type}")


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
        if shift > 63:
            raise ValueError("a varint is too long")
