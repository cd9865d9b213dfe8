"""The server's tokenizer, as `LLM.get_tokenizer` returns it: the ids and prompts that the model gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.result import Message

Ask = Callable[[str, Mapping[str, Any]], Any]
"""Sends a body to a route of the server and returns its answer."""


class Tokenizer:
    """Texts to token ids and back. Its methods are those of transformers' tokenizers that prompts are made with."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text's tokens, after those that begin every prompt unless `add_special_tokens` is False."""
        if not text and not add_special_tokens:
            return []
        return list(self._ask("/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})["tokens"])

    def decode(self, token_ids: int | Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        listed = [ids] if isinstance(ids, int) else [int(token_id) for token_id in ids]
        return str(self._ask("/detokenize", {"tokens": listed})["prompt"]) if listed else ""

    def apply_chat_template(
        self, conversation: Sequence[Message], *, tokenize: bool = True, **fields: Any
    ) -> str | list[int]:
        """The prompt of a conversation: its token ids or, without `tokenize`, its text.

        `fields` are those of a chat: `tools`, `add_generation_prompt` (False unless given, as in transformers),
        `continue_final_message`, `chat_template_kwargs`.
        """
        body = {"messages": list(conversation), "add_generation_prompt": False, **fields}
        if tokenize:
            return list(self._ask("/tokenize", body)["tokens"])
        return str(self._ask("/chat_tokenize", body)["templated_text"])

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text under the name `input_ids`."""
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
