"""A step as the worker sees it: what a plan asks and what its result answers. proto/worker.proto explains every field.

No torch and no protobuf here: `service` translates from and to the wire, `engine` executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sequence's text must be an instance of."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are chosen. Constant for its life."""

    do_sample: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()  # (token id, what is added); several of one id add up
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    watermark: bool = False
    top_n: int = 0
    prompt_logprobs: bool = False
    model_logprobs: bool = False  # logprobs of the model's own distribution instead of the processed one
    grammar: Grammar | None = None

    @property
    def constrained(self) -> bool:
        return self.grammar is not None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence told in full."""

    sequence_id: int
    token_ids: Sequence[int]  # every token known
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_ids: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    adapter_id: str = ""
    num_source_tokens: int = 0  # of an encoder–decoder: how many of token_ids, at the beginning, are the encoder's


@dataclass(frozen=True, slots=True)
class Advance:
    """One sequence's part of a step."""

    sequence_id: int
    num_tokens: int
    new_block_ids: Sequence[int] = ()
    sample: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: differences to what the worker knows, applied in the order of the fields."""

    step: int
    freed_sequence_ids: Sequence[int] = ()
    new_sequences: Sequence[NewSequence] = ()
    advances: Sequence[Advance] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token or one of the prompt, and its natural logarithm of probability."""

    id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()  # alternatives and their logprobs, best first


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one advance brought: tokens, or the error that ended its sequence."""

    sequence_id: int
    tokens: Sequence[Token] = ()
    prompt_tokens: Sequence[Token] = ()
    error: str = ""
    request_is_at_fault: bool = False  # with an error; otherwise the server is


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where a step's time went, in seconds."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a plan; `outputs` in the order of its advances, empty on every rank but the first."""

    step: int
    outputs: Sequence[SequenceOutput] = ()
    timing: StepTiming = field(default_factory=StepTiming)
