"""What the server generated: plain dataclasses, one for each generation, so that they make a `pandas.DataFrame`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""A message of a conversation, as in OpenAI's API: `{"role": "user", "content": "Hi"}`."""
Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""
TokenLogprobs = Sequence[Mapping[int, float]]
"""For each token the logprobs of the most probable ones, by token id."""
Drafts = Sequence[Mapping[str, int]]
"""With `return_drafts`, for each step that verified a draft: `token_index`, the position in `token_ids` of the step's
first token, and the number of its `verified` draft tokens. The first `accepted` ones are the tokens from there on."""

_TOKEN_PREFIX = "token_id:"  # noqa: S105


@dataclass(frozen=True, slots=True)
class Completion:
    """One generation. With `n` above 1 each prompt has several, `choice` 0 to n - 1."""

    index: int
    """Position of the prompt."""
    choice: int
    prompt: Prompt | Sequence[Message]
    text: str
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    token_ids: list[int]
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had, of all choices together."""
    logprobs: list[float] | None = None
    top_logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[Mapping[int, float] | None] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a stream adds: text, or reasoning, and the tokens that it was made of. `finish_reason` ends a choice."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    reasoning: str | None = None
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text."""

    index: int
    text: Prompt
    vector: list[float]


def completions(index: int, prompt: Prompt, answer: Mapping[str, Any]) -> list[Completion]:
    """The generations in an answer of /v1/completions."""
    return [_completion(index, prompt, answer, choice) for choice in answer["choices"]]


def _completion(index: int, prompt: Prompt, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Completion:
    logprobs = choice.get("logprobs")
    return Completion(
        index=index,
        choice=choice["index"],
        prompt=prompt,
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        token_ids=choice["token_ids"],
        prompt_token_ids=choice["prompt_token_ids"],
        num_cached_tokens=_num_cached_tokens(answer),
        logprobs=logprobs and logprobs["token_logprobs"],
        top_logprobs=logprobs and [_by_id(top or {}) for top in logprobs["top_logprobs"]],
        prompt_logprobs=_prompt_logprobs(choice),
        drafts=choice.get("drafts"),
    )


def chat_completions(index: int, conversation: Sequence[Message], answer: Mapping[str, Any]) -> list[Completion]:
    """The generations in an answer of /v1/chat/completions."""
    return [_chat_completion(index, conversation, answer, choice) for choice in answer["choices"]]


def _chat_completion(
    index: int, conversation: Sequence[Message], answer: Mapping[str, Any], choice: Mapping[str, Any]
) -> Completion:
    message, logprobs = choice["message"], choice.get("logprobs")
    tokens = logprobs and logprobs["content"]
    return Completion(
        index=index,
        choice=choice["index"],
        prompt=conversation,
        text=message["content"] or "",
        finish_reason=choice["finish_reason"],
        token_ids=choice["token_ids"],
        prompt_token_ids=answer["prompt_token_ids"],
        num_cached_tokens=_num_cached_tokens(answer),
        logprobs=tokens and [token["logprob"] for token in tokens],
        top_logprobs=tokens
        and [_by_id({top["token"]: top["logprob"] for top in token["top_logprobs"]}) for token in tokens],
        prompt_logprobs=_prompt_logprobs(answer),
        reasoning=message.get("reasoning"),
        tool_calls=message.get("tool_calls"),
        drafts=choice.get("drafts"),
    )


def chunks(event: Mapping[str, Any]) -> list[Chunk]:
    """The additions in an event of a stream of either route."""
    return [_chunk(choice) for choice in event["choices"]]


def _chunk(choice: Mapping[str, Any]) -> Chunk:
    delta = choice.get("delta", choice)
    text = delta.get("text") or delta.get("content") or ""
    return Chunk(
        choice["index"],
        text,
        choice.get("token_ids") or [],
        choice.get("finish_reason"),
        delta.get("reasoning"),
        choice.get("drafts"),
    )


def _num_cached_tokens(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _by_id(logprobs: Mapping[str, float]) -> dict[int, float]:
    return {int(token.removeprefix(_TOKEN_PREFIX)): logprob for token, logprob in logprobs.items()}


def _prompt_logprobs(answer: Mapping[str, Any]) -> list[dict[int, float] | None] | None:
    listed = answer.get("prompt_logprobs")
    if listed is None:
        return None
    return [token and {int(token_id): found["logprob"] for token_id, found in token.items()} for token in listed]
