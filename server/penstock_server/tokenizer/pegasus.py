"""Pegasus' tokenizer: T5's vocabulary, with mask and unused tokens inserted after the first two pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.sentencepiece_json import CONTROL, Piece, Vocabulary, spaced_json, whole_tokens
from penstock_server.tokenizer.settings import Settings

NUM_KEPT = 2  # padding and end stay first
UNUSED_SCORE = -100.0


def pegasus_json(vocabulary: Vocabulary, settings: Settings) -> dict[str, Any]:
    """Builds `tokenizer.json`. Raises ConfigError when the vocabulary does not begin with padding and end."""
    first = [settings.token("pad_token"), settings.token("eos_token")]
    found = [piece.text for piece in vocabulary.pieces[:NUM_KEPT]]
    if found != first:
        raise ConfigError(f"the SentencePiece model begins with {found}; a Pegasus vocabulary begins with {first}")
    masks = [text for role in ("mask_token_sent", "mask_token") if (text := settings.token(role))]
    unused = [f"<unk_{index}>" for index in range(2, int(settings.values.get("offset", 103)))]
    inserted = [Piece(text, 0.0, CONTROL) for text in masks] + [Piece(text, UNUSED_SCORE, CONTROL) for text in unused]
    pieces = [*vocabulary.pieces[:NUM_KEPT], *inserted, *vocabulary.pieces[NUM_KEPT:]]
    vocabulary = replace(vocabulary, pieces=pieces, byte_fallback=False)
    ids = {piece.text: id_ for id_, piece in enumerate(pieces)}
    return settings.complete(spaced_json(vocabulary), ids, whole_tokens(vocabulary))
