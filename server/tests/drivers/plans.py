"""Plans made of lists and results as lists, for tests that drive the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_server.engine import Engine
from penstock_server.protocol.plan import Advances, Fault, NewSequence, Plan, StepResult, Tokens, Top


@dataclass(frozen=True)
class Advance:
    """One entry of the columns in `Advances`."""

    sequence_id: int
    num_tokens: int
    new_block_ids: Sequence[int] = ()
    sample: bool = False
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float
    top: Top = ()


@dataclass
class Output:
    """What one advance returned."""

    sequence_id: int
    tokens: Sequence[Token] = ()
    prompt_tokens: Sequence[Token] = ()
    error: str = ""
    fault: Fault | None = None  # fault of a failed sequence


def columns(advances: Sequence[Advance]) -> Advances:
    return Advances.of(
        [advance.sequence_id for advance in advances],
        [advance.num_tokens for advance in advances],
        [advance.sample for advance in advances],
        [advance.new_block_ids for advance in advances],
        [advance.num_draft_tokens for advance in advances],
    )


def plan(
    step: int,
    freed: Sequence[int] = (),
    new_sequences: Sequence[NewSequence] = (),
    advances: Sequence[Advance] = (),
) -> Plan:
    return Plan(step, freed, new_sequences, columns(advances))


def outputs(result: StepResult, plan: Plan) -> list[Output]:
    """In the order of the plan's advances; advances that returned nothing have none."""
    by_id: dict[int, Output] = {}
    for sequence_id, token in zip(result.sequence_ids.tolist(), listed(result.sampled), strict=True):
        output = by_id.setdefault(sequence_id, Output(sequence_id))
        output.tokens = [*output.tokens, token]
    for sequence_id, tokens in result.prompts.items():
        by_id.setdefault(sequence_id, Output(sequence_id)).prompt_tokens = listed(tokens)
    for failure in result.failures:
        assert failure.sequence_id not in by_id, "a failed sequence has no other output"
        by_id[failure.sequence_id] = Output(failure.sequence_id, error=failure.reason, fault=failure.fault)
    return [by_id[sequence_id] for sequence_id in plan.advances.sequence_ids.tolist() if sequence_id in by_id]


def step(engine: Engine, plan: Plan) -> list[Output]:
    return outputs(engine.step(plan), plan)


def listed(tokens: Tokens) -> list[Token]:
    columns = enumerate(zip(tokens.ids.tolist(), tokens.logprobs.tolist(), strict=True))
    return [Token(token_id, logprob, tokens.tops.get(index, ())) for index, (token_id, logprob) in columns]
