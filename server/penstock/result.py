"""What the server generated: a `Result` for each prompt, with a `Completion` for each of its generations.

The names are vLLM's where the meaning is the same: `result.outputs[0].text`. A prompt usually has one generation, so a
result has its fields too: `result.text`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RequestError

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
    """One generation. `index` is its number among those of its prompt, 0 to n - 1."""

    index: int
    text: str
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: TokenLogprobs | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    drafts: Drafts | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' logprobs; None without `logprobs`."""
        return None if self.logprobs is None else sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one prompt. `index` is its position among the prompts.

    A prompt that the server refused has no outputs but an `error`, if the call was told to keep errors; reading one of
    the generation's fields then raises it.
    """

    index: int
    prompt: Prompt | Sequence[Message]
    outputs: list[Completion] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had, of all outputs together."""
    prompt_logprobs: Sequence[Mapping[int, float] | None] | None = None
    error: RequestError | None = None

    def _first(self) -> Completion:
        if self.error is not None:
            raise self.error
        return self.outputs[0]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self._first().text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first output."""
        return self._first().token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first output ended."""
        return self._first().finish_reason

    @property
    def logprobs(self) -> list[float] | None:
        """Logprobs of the first output's tokens."""
        return self._first().logprobs

    @property
    def top_logprobs(self) -> TokenLogprobs | None:
        """Most probable tokens at each position of the first output."""
        return self._first().top_logprobs

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the first output."""
        return self._first().reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]] | None:
        """Tool calls of the first output."""
        return self._first().tool_calls

    @property
    def drafts(self) -> Drafts | None:
        """Drafts of the first output."""
        return self._first().drafts

    @property
    def request_id(self) -> str:
        """The position among the prompts as a text."""
        return str(self.index)

    @property
    def finished(self) -> bool:
        """True: a result is made when its last output has ended."""
        return True

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for each output, or one with `error`: the rows of a table."""
        shared = {"index": self.index, "prompt": self.prompt}
        if self.error is not None:
            return [{**shared, "choice": 0, "error": self.error.args[0], "status": self.error.status}]
        of_prompt = {
            "prompt_token_ids": self.prompt_token_ids,
            "num_cached_tokens": self.num_cached_tokens,
            "prompt_logprobs": self.prompt_logprobs,
        }
        return [{**shared, "choice": output.index, **_without_index(output), **of_prompt} for output in self.outputs]


def _without_index(output: Completion) -> dict[str, Any]:
    fields = dataclasses.asdict(output)
    del fields["index"]
    return fields


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

    @property
    def outputs(self) -> Embedding:
        """The same, where vLLM has it: `output.outputs.embedding`."""
        return self

    @property
    def embedding(self) -> list[float]:
        """vLLM's name of `vector`."""
        return self.vector


def of_completion(index: int, prompt: Prompt, answer: Mapping[str, Any]) -> Result:
    """The result in an answer of /v1/completions to one prompt."""
    choices = answer["choices"]
    return Result(
        index,
        prompt,
        [_completion(choice) for choice in choices],
        choices[0]["prompt_token_ids"],
        _num_cached_tokens(answer),
        _prompt_logprobs(choices[0]),
    )


def _completion(choice: Mapping[str, Any]) -> Completion:
    logprobs = choice.get("logprobs")
    return Completion(
        index=choice["index"],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        token_ids=choice["token_ids"],
        logprobs=logprobs and logprobs["token_logprobs"],
        top_logprobs=logprobs and [_by_id(top or {}) for top in logprobs["top_logprobs"]],
        drafts=choice.get("drafts"),
    )


def of_chat(index: int, conversation: Sequence[Message], answer: Mapping[str, Any]) -> Result:
    """The result in an answer of /v1/chat/completions."""
    return Result(
        index,
        conversation,
        [_chat_completion(choice) for choice in answer["choices"]],
        answer["prompt_token_ids"],
        _num_cached_tokens(answer),
        _prompt_logprobs(answer),
    )


def _chat_completion(choice: Mapping[str, Any]) -> Completion:
    message, logprobs = choice["message"], choice.get("logprobs")
    tokens = logprobs and logprobs["content"]
    return Completion(
        index=choice["index"],
        text=message["content"] or "",
        finish_reason=choice["finish_reason"],
        token_ids=choice["token_ids"],
        logprobs=tokens and [token["logprob"] for token in tokens],
        top_logprobs=tokens
        and [_by_id({top["token"]: top["logprob"] for top in token["top_logprobs"]}) for token in tokens],
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
