"""Reads SentencePiece model files, which are protocol buffers: only the few fields that the conversion needs."""

from __future__ import annotations

import struct
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
    from google.protobuf.message import DecodeError  # only when needed: `prepare` starts in 0.1 s

    data = path.read_bytes()
    try:
        fields = _fields(data)
        pieces = [_piece(value) for number, value in fields if number == PIECES and isinstance(value, bytes)]
        trainer, normalizer = _message(fields, TRAINER), _message(fields, NORMALIZER)
    except (DecodeError, KeyError, ValueError) as error:
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
    text, score, type_ = values[PIECE_TEXT], values.get(PIECE_SCORE, 0), values.get(PIECE_TYPE, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, int) or not isinstance(type_, int):
        raise ValueError("a piece has fields of wrong types")
    return Piece(text.decode(), struct.unpack("<f", struct.pack("<I", score))[0], type_)


def _message(fields: list[tuple[int, int | bytes]], number: int) -> dict[int, int | bytes]:
    for found, value in fields:
        if found == number and isinstance(value, bytes):
            return dict(_fields(value))
    return {}


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """The number and value of each field of a message. Floats are returned as their bits."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    message = Empty()
    message.ParseFromString(data)
    return [(field.field_number, field.data) for field in UnknownFieldSet(message)]
