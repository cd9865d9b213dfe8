"""Parameters of a generation, under the names of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from penstock import call_name

_CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


StructuredOutputsParams = dict[str, Any]
"""vLLM's class of constraints: `json`, `regex`, `choice`, `grammar`, `structural_tag`, `json_object`."""
GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name of it."""
# They choose among vLLM's implementations of constraints.
_BACKENDS = {"backend", "backend_was_auto", "_backend", "_backend_was_auto"}


def _own_names(given: dict[str, Any]) -> dict[str, Any]:
    if (guided := given.pop("guided_decoding", None)) is not None:
        if given.get("structured_outputs") is not None:
            raise TypeError("guided_decoding is another name of structured_outputs, which is given too")
        given["structured_outputs"] = guided
    if given.get("best_of") == given.get("n"):
        given.pop("best_of", None)
    known = [field.name for field in fields(SamplingParams)]
    call_name.check("sampling parameter", given, known)
    return {name: value for name, value in given.items() if name in known}


class _OtherNames(type):
    """Classes that are also called with vLLM's names."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        return super().__call__(*args, **_own_names(given))


@dataclass(slots=True, kw_only=True)
class SamplingParams(metaclass=_OtherNames):
    """How tokens are sampled, and when a generation ends. The server checks the values; None means the model's default,
    or else the API's. vLLM's further names have no effect, or are refused with what to use."""

    max_tokens: int | None = None
    """Most tokens to generate. By default 16 for a prompt, as in OpenAI's API, and all that fit for a chat."""
    min_tokens: int | None = None
    n: int | None = None
    """Generations for each prompt."""
    temperature: float | None = None
    """0 is greedy. 1 by default, unless the model has another."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    """The same prompt with the same seed gets the same tokens. Random by default."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    """Return logprobs, with this number of alternatives for each token; 0 returns those of the chosen tokens only."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Needs `LLM(enable_prefill_logprobs=True)`."""
    thinking_token_budget: int | None = None
    """Most tokens of a chat's reasoning, which is ended then."""
    truncate_prompt_tokens: int | None = None
    """Keep only this number of last tokens of the prompt; -1 means as many as the server allows."""
    priority: int | None = None
    timeout: float | None = None
    """Seconds after which the request fails."""
    return_drafts: bool | None = None
    """Return the drafts that steps verified, with `LLM(speculate=…)`."""
    json_schema: Mapping[str, Any] | str | type | None = None
    """The text is JSON of this schema: an object, JSON text, or a class with `model_json_schema`, as pydantic's."""
    regex: str | None = None
    """The whole text matches this regular expression."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """The text matches this grammar, in Lark's syntax or in GBNF."""
    structural_tag: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    """The same constraints under vLLM's names, as `StructuredOutputsParams` makes them."""

    def fields(self, *, is_chat: bool) -> dict[str, Any]:
        """The request's fields."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        constraint = {
            name: value
            for name, value in dict(given.pop("structured_outputs", {})).items()
            if value is not None and name not in _BACKENDS
        }
        constraint |= {_CONSTRAINTS[name]: given.pop(name) for name in list(given) if name in _CONSTRAINTS}
        if (schema := constraint.get("json")) is not None:
            constraint["json"] = _schema(schema)
        if constraint:
            given["structured_outputs"] = constraint
        if "logit_bias" in given:
            given["logit_bias"] = {str(token_id): bias for token_id, bias in given["logit_bias"].items()}
        if is_chat and "logprobs" in given:
            given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
        return given


def _schema(schema: Any) -> Any:
    if hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    return schema  # the server also reads JSON text
