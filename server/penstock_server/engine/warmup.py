"""The worst step that the limits allow, run before the worker is ready.

The block tables point again and again to the same few blocks, so that the longest contexts are attended to without the
pool that they would fill: time and scratch memory are those of the real thing, the numbers are meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.attention.interface import StepBatch
from penstock_server.engine.sampler import Sampler, SampleRequest
from penstock_server.engine.sequence import SAMPLING_FIELDS
from penstock_server.models.interface import CausalModel

_MAX_BLOCKS = 256  # of the temporary cache


@dataclass(frozen=True, slots=True)
class WorstStep:
    """The limits of a step, as warm-up runs them."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    max_context_tokens: int  # of all sequences together: what the pool could hold
    block_tokens: int

    def num_blocks(self) -> int:
        """Blocks that the temporary cache needs."""
        return min(_MAX_BLOCKS, -(-self.max_step_tokens // self.block_tokens))


def prefill(limits: WorstStep) -> tuple[list[int], list[int]]:
    """(tokens, contexts) of a step with as many tokens as there may be, of as few sequences as can hold them."""
    num_tokens: list[int] = []
    left = limits.max_step_tokens
    while left and len(num_tokens) < limits.max_step_sequences:
        num_tokens.append(min(left, limits.max_sequence_tokens))
        left -= num_tokens[-1]
    return num_tokens, list(num_tokens)


def decode(limits: WorstStep) -> tuple[list[int], list[int]]:
    """(tokens, contexts) of a step with as many sequences as there may be: one at full length, the others sharing."""
    num = min(limits.max_step_sequences, limits.max_step_tokens)
    longest = min(limits.max_sequence_tokens, limits.max_context_tokens)
    others = min(longest, max(1, (limits.max_context_tokens - longest) // max(1, num - 1)))
    return [1] * num, [longest] + [others] * (num - 1)


def run(
    model: CausalModel,
    sampler: Sampler,
    limits: WorstStep,
    step: tuple[list[int], list[int]],
    device: torch.device,
) -> None:
    """One step over the temporary cache, sampled with every option on and with none."""
    num_tokens, contexts = step
    logits = model.forward(_batch(limits, num_tokens, contexts, device))
    if logits is None:
        return
    num = len(num_tokens)
    parameters = np.zeros(num, SAMPLING_FIELDS)
    parameters["do_sample"] = True
    parameters["temperature"] = 0.7
    parameters["top_k"] = model.vocab_size  # makes the sampler sort whole rows
    parameters["repetition_penalty"] = 1.1
    parameters["model_logprobs"] = True

    def history(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.zeros((len(places), max(contexts)), np.int64)

    request = SampleRequest(parameters, np.array(contexts), history)
    sampler.sample(logits, request).ids.cpu()
    plain = np.zeros(num, SAMPLING_FIELDS)
    for name in ("temperature", "top_p", "repetition_penalty"):
        plain[name] = 1
    sampler.sample(logits, SampleRequest(plain, np.array(contexts), history)).ids.cpu()


def _batch(limits: WorstStep, num_tokens: list[int], contexts: list[int], device: torch.device) -> StepBatch:
    counts, lens = np.array(num_tokens), np.array(contexts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(starts[-1]) + np.repeat(lens - counts - starts[:-1], counts)
    width = -(-max(contexts) // limits.block_tokens)
    table = np.broadcast_to(np.arange(width) % limits.num_blocks(), (len(counts), width))
    slots = np.arange(starts[-1]) % (limits.num_blocks() * limits.block_tokens)

    def tensor(array: npt.NDArray[np.int64], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(array, dtype, order="C")).to(device)

    return StepBatch(
        token_ids=tensor(np.zeros_like(positions), np.int64),
        positions=tensor(positions, np.int64),
        slots=tensor(slots, np.int64),
        query_starts=tensor(starts, np.int32),
        context_lens=tensor(lens, np.int32),
        block_tables=tensor(table, np.int32),
        sample_rows=tensor(starts[1:] - 1, np.int64),
        max_query_tokens=max(num_tokens),
        max_context_tokens=max(contexts),
    )
