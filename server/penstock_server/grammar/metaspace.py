"""Tokenizers with a Metaspace decoder, such as T5's, which llguidance cannot read without a replacement decoder.

A Metaspace decoder drops the space of a text's first token. The output of an encoder–decoder model is a text of its
own, so its first token decodes to a shorter text than the same token later. `FirstTokens` lists the affected tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_server.errors import GrammarError


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The tokens that an output may begin with: bit i stands for token i. Tokens with several leading spaces are in
    neither."""

    bare: int  # tokens that decode to the same text at the beginning
    spaced: int  # tokens that lose their leading space at the beginning

    def is_spaced(self, token_id: int) -> bool:
        """Whether the token loses its leading space at the beginning."""
        return bool(self.spaced >> token_id & 1)


@dataclass(frozen=True, slots=True)
class Metaspace:
    """A tokenizer.json with a Metaspace decoder."""

    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Metaspace | None:
        """Returns None when the file has another decoder or is damaged.

        Raises GrammarError when it has byte tokens, which a Metaspace decoder does not decode to bytes.
        """
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text) if '"Metaspace"' in text else {}
            decoder = content.get("decoder") or {}
        except (AttributeError, ValueError):
            return None
        if decoder.get("type") != "Metaspace":
            return None
        this = cls(content)
        if "<0x0A>" in this._texts():
            raise GrammarError("this model's tokenizer has byte tokens, which its decoder does not decode")
        return this

    def readable(self) -> str:
        """A tokenizer.json for llguidance: tokens decode as in the middle of a text, and no space is added to texts."""
        space = self._space
        splitter = {"type": "Metaspace", "replacement": space, "prepend_scheme": "never", "split": True}
        spaces = {"type": "Replace", "pattern": {"String": space}, "content": " "}
        decoder = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        return json.dumps({**self.content, "normalizer": None, "pre_tokenizer": splitter, "decoder": decoder})

    def first_tokens(self, vocab_size: int) -> FirstTokens | None:
        """Returns None when the decoder keeps the leading space."""
        scheme = self.content["decoder"].get("prepend_scheme", "always")
        if scheme == "never" or self.content["decoder"].get("add_prefix_space") is False:
            return None
        kinds = bytearray(-(-vocab_size // 8)), bytearray(-(-vocab_size // 8))
        for text, token_id in self._texts().items():
            num_spaces = text.count(self._space)
            if token_id < vocab_size and num_spaces == text.startswith(self._space):
                kinds[num_spaces][token_id // 8] |= 1 << token_id % 8
        bare, spaced = (int.from_bytes(bits, "little") for bits in kinds)
        return FirstTokens(bare, spaced)

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token."""
        model = self.content["model"]
        found = model["unk_id"] if "unk_id" in model else self._texts().get(model.get("unk_token") or "")
        return None if found is None else int(found)

    @property
    def _space(self) -> str:
        return str(self.content["decoder"].get("replacement", "▁"))

    def _texts(self) -> dict[str, int]:
        vocabulary = self.content["model"]["vocab"]
        if isinstance(vocabulary, list):  # a unigram model: (token, score) pairs
            vocabulary = {text: token_id for token_id, (text, _) in enumerate(vocabulary)}
        return vocabulary | {token["content"]: token["id"] for token in self.content.get("added_tokens", [])}
