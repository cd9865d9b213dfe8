"""The worst step that the limits allow, run before the worker is ready.

The block tables point again and again to the same few blocks, so that the longest contexts are attended to without the
pool that they would fill: time and scratch memory are those of the real thing, the numbers are meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.attention.interface import StepBatch
from penstock_server.engine.batch import PromptRows
from penstock_server.engine.constraint import Constraints
from penstock_server.engine.prompt import CHUNK_ROWS, score_prompt
from penstock_server.engine.sampler import Sampler, SampleRequest
from penstock_server.engine.sampling import SAMPLING_FIELDS, compose, record
from penstock_server.models.interface import CausalModel
from penstock_server.plan import Grammar, Sampling

_MAX_BLOCKS = 256  # of the temporary cache
_TOP_N = 20  # as many alternatives as OpenAI's interface allows
_EVERYTHING = Sampling(
    grammar=Grammar("regex", "(?s).*"),
    do_sample=True,
    temperature=0.7,
    top_k=1 << 62,  # no head shows where to cut
    top_p=0.99,
    typical_p=0.99,
    min_p=1e-6,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    watermark=True,
    top_n=_TOP_N,
    model_logprobs=True,
)


@dataclass(frozen=True, slots=True)
class WorstStep:
    """The limits of a step, as warm-up runs them."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    max_context_tokens: int  # of all sequences together: what the pool could hold
    block_tokens: int
    max_source_tokens: int = 0  # 0: the model has no encoder

    def num_blocks(self) -> int:
        """Blocks that the temporary cache needs."""
        return min(_MAX_BLOCKS, -(-self.max_step_tokens // self.block_tokens))


@dataclass(frozen=True, slots=True)
class _LongHistory:
    """As many tokens as there may be, of the prompt and behind it."""

    num_tokens: int

    def known(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.zeros((len(places), self.num_tokens), np.int64)

    def generated(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        return self.known(places), np.ones((len(places), self.num_tokens), np.bool_)


Step = tuple[list[int], list[int]]  # of each sequence: tokens that it advances, and its context with them


def worst_steps(limits: WorstStep) -> tuple[tuple[str, Step], ...]:
    """By name. No step within the limits takes more memory than the largest of these."""
    steps = (
        ("worst prefill", prefill(limits)),
        ("worst decode", decode(limits)),
        ("worst mixed step", mixed(limits)),
    )
    return (*steps, ("worst sources", sources(limits))) if limits.max_source_tokens else steps


def prefill(limits: WorstStep) -> Step:
    """As many tokens as there may be, of as few sequences as can hold them, at the end of the longest contexts."""
    num_tokens: list[int] = []
    contexts: list[int] = []
    left, room = limits.max_step_tokens, limits.max_context_tokens
    while left and len(num_tokens) < limits.max_step_sequences:
        num_tokens.append(min(left, limits.max_sequence_tokens))
        contexts.append(max(num_tokens[-1], min(room, limits.max_sequence_tokens)))
        left -= num_tokens[-1]
        room = max(0, room - contexts[-1])
    return num_tokens, contexts


def sources(limits: WorstStep) -> Step:
    """As many tokens of sources as there may be: whole prompts, each with the one token that begins the answer."""
    longest = min(limits.max_source_tokens + 1, limits.max_step_tokens, limits.max_sequence_tokens)
    return prefill(replace(limits, max_sequence_tokens=longest))


def decode(limits: WorstStep) -> Step:
    """As many sequences as there may be: one at full length, the others sharing what is left of the pool."""
    num = min(limits.max_step_sequences, limits.max_step_tokens)
    longest = min(limits.max_sequence_tokens, limits.max_context_tokens)
    others = min(longest, max(1, (limits.max_context_tokens - longest) // max(1, num - 1)))
    return [1] * num, [longest] + [others] * (num - 1)


def mixed(limits: WorstStep) -> Step:
    """As many sequences and as many tokens: the decode whose longest sequence is still at its prompt."""
    num_tokens, contexts = decode(limits)
    num_tokens[0] = min(contexts[0], limits.max_step_tokens - len(num_tokens) + 1)
    return num_tokens, contexts


def run(
    model: CausalModel,
    sampler: Sampler,
    limits: WorstStep,
    step: Step,
    device: torch.device,
) -> None:
    """One step over the temporary cache, sampled with every option on and with none."""
    num_tokens, contexts = step
    step_batch = _batch(limits, num_tokens, contexts, device)
    hidden = model.forward(step_batch)
    num = len(num_tokens)
    # Every row that can have an output has one, as if all were prompt tokens whose logprobs are wanted; one chunk of
    # them takes as much memory as all one after the other.
    chunk = np.arange(min(len(hidden), CHUNK_ROWS[device.type]))
    prompt = PromptRows(chunk, np.zeros_like(chunk), chunk)
    score_prompt(model, sampler, hidden, prompt, np.full(len(chunk), _TOP_N))
    last = torch.from_numpy(np.cumsum(num_tokens) - 1).to(device)
    logits = model.logits(hidden[torch.searchsorted(step_batch.sample_rows, last)])
    if logits is None:
        return
    history = _LongHistory(max(contexts))
    lens = np.array(contexts)
    nothing_forbidden = np.full((num, -(-model.vocab_size // 32)), -1, np.int32)
    constraints = Constraints(np.arange(num), nothing_forbidden)
    for sampling in (_EVERYTHING, Sampling(), Sampling(grammar=_EVERYTHING.grammar)):
        records = np.array([record(sampling)] * num, SAMPLING_FIELDS)
        composition = compose(records, dict.fromkeys(range(num), sampling))
        request = SampleRequest(composition, lens, lens, np.zeros_like(lens), history, constraints)
        sampler.sample(logits, request).ids.cpu()


def _batch(limits: WorstStep, num_tokens: list[int], contexts: list[int], device: torch.device) -> StepBatch:
    counts, lens = np.array(num_tokens), np.array(contexts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(starts[-1]) + np.repeat(lens - counts - starts[:-1], counts)
    width = -(-max(contexts) // limits.block_tokens)
    table = np.broadcast_to(np.arange(width) % limits.num_blocks(), (len(counts), width))
    slots = np.arange(starts[-1]) % (limits.num_blocks() * limits.block_tokens)
    # The longest sources: of a prompt that begins here all but a token, of one that goes on all before this step.
    room = np.where(counts == lens, lens - 1, lens - counts)
    source_lens = np.minimum(room, limits.max_source_tokens)

    def tensor(array: npt.NDArray[np.int64], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(array, dtype, order="C")).to(device)

    return StepBatch(
        token_ids=tensor(np.zeros_like(positions), np.int64),
        positions=tensor(positions, np.int64),
        slots=tensor(slots, np.int64),
        query_starts=tensor(starts, np.int32),
        context_lens=tensor(lens, np.int32),
        block_tables=tensor(table, np.int32),
        sample_rows=tensor(np.flatnonzero(positions >= np.repeat(source_lens, counts)), np.int64),
        max_query_tokens=max(num_tokens),
        max_context_tokens=max(contexts),
        source_lens=tensor(source_lens, np.int32) if limits.max_source_tokens else None,
    )
