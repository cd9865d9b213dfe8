"""Tokenizers whose decoder is Metaspace, as T5's: llguidance reads their tokens with ours in its place.

Such a decoder leaves out the space of a text's first token. An encoder–decoder's answers are texts of their own, so
their first tokens stand for less than the same tokens later on: `FirstTokens` says for which that matters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import GrammarError

# Bit b of word w stands for token 32·w + b, as little-endian memory has it.
Bits = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """What an answer may begin with: [words] each. Tokens with more spaces than one at their beginning are neither."""

    bare: Bits  # tokens that are at the beginning what they are anywhere
    spaced: Bits  # tokens that lose their first byte, a space, there

    def is_spaced(self, token_id: int) -> bool:
        return bool(int(self.spaced[token_id // 32]) >> token_id % 32 & 1)


@dataclass(frozen=True, slots=True)
class Metaspace:
    """A tokenizer.json with such a decoder."""

    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Metaspace | None:
        """None: it has another decoder, or is damaged. Raises GrammarError when tokens look like bytes and are none."""
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
            raise GrammarError("this model's tokenizer has tokens for single bytes, which its decoder does not read")
        return this

    def readable(self) -> str:
        """The tokenizer.json that llguidance takes: tokens are what they are in the middle of a text, and texts are cut
        as they stand."""
        space = self._space
        cut = {"type": "Metaspace", "replacement": space, "prepend_scheme": "never", "split": True}
        spaces = {"type": "Replace", "pattern": {"String": space}, "content": " "}
        decoder = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        return json.dumps({**self.content, "normalizer": None, "pre_tokenizer": cut, "decoder": decoder})

    def first_tokens(self, vocab_size: int) -> FirstTokens | None:
        """None: the decoder leaves the space."""
        scheme = self.content["decoder"].get("prepend_scheme", "always")
        if scheme == "never" or self.content["decoder"].get("add_prefix_space") is False:
            return None
        kinds = np.zeros((2, -(-vocab_size // 32) * 32), np.uint8)
        for text, token_id in self._texts().items():
            num_spaces = text.count(self._space)
            if token_id < vocab_size and num_spaces == text.startswith(self._space):
                kinds[num_spaces, token_id] = 1
        bare, spaced = np.packbits(kinds, axis=1, bitorder="little").view(np.int32)
        return FirstTokens(bare, spaced)

    @property
    def unknown_id(self) -> int | None:
        model = self.content["model"]
        found = model["unk_id"] if "unk_id" in model else self._texts().get(model.get("unk_token") or "")
        return None if found is None else int(found)

    @property
    def _space(self) -> str:
        return str(self.content["decoder"].get("replacement", "▁"))

    def _texts(self) -> dict[str, int]:
        vocabulary = self.content["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
            vocabulary = {text: token_id for token_id, (text, _) in enumerate(vocabulary)}
        return vocabulary | {token["content"]: token["id"] for token in self.content.get("added_tokens", [])}
