"""What callers give as prompts and conversations, in plain Python: a text, token ids, or messages.

Every prompt is looked at before the first one is sent. One that cannot be sent becomes a `RequestError` with its index,
as if the server had refused it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.errors import RequestError
from penstock.result import Message, Prompt

_KEYS = ("prompt", "prompt_token_ids")
_ALLOWED = "a text, a list of token ids, or a mapping with prompt or prompt_token_ids"


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt or conversation as it is sent. fields: further fields of its request, such as `cache_salt`."""

    prompt: Prompt | Sequence[Message]
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: RequestError | None = None


def prompts(given: Any) -> list[Given]:
    """Each prompt of a call: `given` is one or several. Arrays count as lists. Raises TypeError if it is neither."""
    if hasattr(given, "iterrows") or hasattr(given, "iter_rows"):
        raise TypeError("prompts is a table; give one of its columns")
    given = _plain(given)
    if isinstance(given, (str, Mapping)) or _is_ids(given):
        return [_prompt(0, given)]
    return [_prompt(index, one) for index, one in enumerate(_several(given, "prompts", _ALLOWED))]


def conversations(given: Any) -> list[Given]:
    """Each conversation of a call: `given` is a list of messages, or several such lists."""
    listed = list(_several(given, "messages", "a list of messages; for a text, use generate"))
    if is_conversation(listed):
        listed = [listed]
    return [_conversation(index, one) for index, one in enumerate(listed)]


def is_conversation(given: Any) -> bool:
    """Whether this is a list of messages."""
    return isinstance(given, (list, tuple)) and bool(given) and _is_message(given[0])


def _several(given: Any, what: str, allowed: str) -> Iterable[Any]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"{what} is {_shown(given)}, must be {allowed}, or several")
    return given


def _prompt(index: int, given: Any) -> Given:
    given, fields = _plain(given), dict[str, Any]()
    if isinstance(given, Mapping):
        fields = {key: value for key, value in given.items() if value is not None}
        named = [key for key in _KEYS if key in fields]
        if not named:
            return _refused(
                index, given, f"has {', '.join(map(repr, given)) or 'no keys'}, must have {_KEYS[0]} or {_KEYS[1]}"
            )
        # With both, the token ids are the prompt, and the text is what they were made of.
        given = _plain(fields[named[-1]])
        fields = {key: value for key, value in fields.items() if key not in _KEYS}
        if unknown := fields.keys() - {"cache_salt"}:
            return _refused(
                index, given, f"has {', '.join(sorted(unknown))}, which LLM does not support; chats take images"
            )
    if isinstance(given, str):
        return Given(given, fields) if given else _refused(index, given, "is empty")
    if _is_ids(given):
        return Given([operator.index(token_id) for token_id in given], fields)
    if isinstance(given, Sequence) and not given and not isinstance(given, bytes):
        return _refused(index, given, "is empty")
    return _refused(index, given, f"is {_shown(given)}, must be {_ALLOWED}")


def _conversation(index: int, given: Any) -> Given:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        return _refused(index, given, f"is {_shown(given)}, must be a list of messages")
    messages = list(given)
    if not messages:
        return _refused(index, messages, "has no messages")
    for number, message in enumerate(messages):
        if not _is_message(message):
            what = f"message {number} is {_shown(message)}, must be a mapping with role and content"
            return _refused(index, messages, what)
    return Given(messages)


def _refused(index: int, prompt: Any, what: str) -> Given:
    error = RequestError(what, status=400, code="validation", param="prompt")
    error.index = index
    return Given(cast("Prompt", prompt), error=error)


def _plain(value: Any) -> Any:
    """Arrays, tensors and columns of tables as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes, bytearray))
        and len(value) > 0
        and all(hasattr(part, "__index__") and not isinstance(part, bool) for part in value)
    )


def _is_message(value: Any) -> bool:
    """A mapping, or an object of a client library, such as openai's answers."""
    return isinstance(value, Mapping) or hasattr(value, "model_dump")


def _shown(value: Any) -> str:
    """A value in an error."""
    text = repr(value)
    kind = "" if value is None or isinstance(value, float) else f" ({type(value).__name__})"
    return (text if len(text) <= 40 else f"{text[:37]}...") + kind
