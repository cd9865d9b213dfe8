"""The parts of `tokenizer.json` that all kinds share: added tokens, and the tokens added around a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is never split. A special token is not part of the visible text."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


def tokenizer_json(
    parts: Mapping[str, Any],
    added: list[AddedToken],
    prefix: Sequence[AddedToken] = (),
    suffix: Sequence[AddedToken] = (),
) -> dict[str, Any]:
    """parts: normalizer, pre_tokenizer, decoder and model. `prefix` and `suffix` are added around every text."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token.id,
                "content": token.content,
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
                "special": token.special,
            }
            for token in sorted(added, key=lambda token: token.id)
        ],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _template(prefix, suffix),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def _template(prefix: Sequence[AddedToken], suffix: Sequence[AddedToken]) -> dict[str, Any] | None:
    if not prefix and not suffix:
        return None

    def template(*names: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, name in enumerate(names):
            pieces += [{"SpecialToken": {"id": token.content, "type_id": type_id}} for token in prefix]
            pieces.append({"Sequence": {"id": name, "type_id": type_id}})
            pieces += [{"SpecialToken": {"id": token.content, "type_id": type_id}} for token in suffix]
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            token.content: {"id": token.content, "ids": [token.id], "tokens": [token.content]}
            for token in (*prefix, *suffix)
        },
    }
