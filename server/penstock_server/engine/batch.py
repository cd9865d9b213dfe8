"""From a plan's advances to one batch: which rows, which tokens, which slots.

An advance that its sequence does not allow fails that sequence alone and leaves the batch. The work is vectorised over
tokens; over sequences there is one short loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.attention.interface import StepBatch
from penstock_server.engine.sequence import SequenceTable
from penstock_server.errors import SequenceError
from penstock_server.plan import Advance

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """The advances of one plan that can be executed, and the errors of those that cannot."""

    indexes: Rows  # place in the plan's advances
    rows: Rows  # row in the sequence table
    num_tokens: Rows
    sample: npt.NDArray[np.bool_]
    errors: dict[int, SequenceError]  # by place in the plan's advances


def select(table: SequenceTable, advances: Sequence[Advance]) -> Selection:
    """Append the new blocks and find the advances that their sequences allow; the others' sequences are failed."""
    errors: dict[int, SequenceError] = {}
    indexes: list[int] = []
    rows: list[int] = []
    for index, advance in enumerate(advances):
        try:
            row = table.row(advance.sequence_id)
            if advance.new_block_ids:
                table.append_blocks(advance.sequence_id, row, advance.new_block_ids)
        except SequenceError as error:
            errors[index] = error
        else:
            indexes.append(index)
            rows.append(row)
    selection = Selection(
        np.array(indexes, np.int64),
        np.array(rows, np.int64),
        np.array([advances[index].num_tokens for index in indexes], np.int64),
        np.array([advances[index].sample for index in indexes], np.bool_),
        errors,
    )
    if not errors and len(set(rows)) == len(rows) and not _refused(table, selection).any():
        return selection
    return _without_broken(table, advances, selection)


def _refused(table: SequenceTable, chosen: Selection) -> npt.NDArray[np.bool_]:
    """Which of the advances break a rule that needs only the table's numbers."""
    ends = table.computed[chosen.rows] + chosen.num_tokens
    known = table.known[chosen.rows]
    refused: npt.NDArray[np.bool_] = (
        (chosen.num_tokens < 1)
        | (ends > known)
        | (ends < table.source[chosen.rows])
        | (ends > table.limits.max_sequence_tokens)
        | (ends > table.num_blocks[chosen.rows] * table.limits.block_tokens)
        | (chosen.sample & (ends != known))
    )
    return refused


def _reason(table: SequenceTable, row: int, advance: Advance) -> str:
    computed, known = int(table.computed[row]), int(table.known[row])
    end, room = computed + advance.num_tokens, int(table.num_blocks[row]) * table.limits.block_tokens
    if advance.num_tokens < 1:
        return "an advance of 0 tokens"
    if end > known:
        return f"an advance of {advance.num_tokens} tokens to {end}, but only {known} are known"
    if end < table.source[row]:
        return f"an advance to {end} tokens, but its source has {int(table.source[row])}, which go together"
    if end > table.limits.max_sequence_tokens:
        return f"would have {end} tokens, at most {table.limits.max_sequence_tokens} are allowed"
    if end > room:
        return f"an advance to {end} tokens, but its blocks hold only {room}"
    return f"a token is to be sampled after {end} tokens, but {known} are known"


def _without_broken(table: SequenceTable, advances: Sequence[Advance], chosen: Selection) -> Selection:
    """Fail the sequences that break a rule and keep the rest; slow, and rare."""
    errors = dict(chosen.errors)
    for index, error in chosen.errors.items():
        if advances[index].sequence_id in table:
            table.fail(advances[index].sequence_id, error.reason)
    rows, counts = np.unique(chosen.rows, return_counts=True)
    repeated = set(rows[counts > 1].tolist())
    refused = _refused(table, chosen)
    keep = np.ones(len(chosen.rows), np.bool_)
    for place, (index, row) in enumerate(zip(chosen.indexes.tolist(), chosen.rows.tolist(), strict=True)):
        sequence_id = advances[index].sequence_id
        if row in repeated:
            reason = "two advances in one plan"
        elif refused[place]:
            reason = _reason(table, row, advances[index])
        else:
            continue
        keep[place] = False
        errors[index] = SequenceError(sequence_id, reason)
    for index, error in errors.items():
        if index not in chosen.errors:
            table.fail(advances[index].sequence_id, error.reason)
    # A sequence may have failed by its second advance only after its first one was accepted.
    failed = {advances[index].sequence_id: error for index, error in errors.items()}
    for place, index in enumerate(chosen.indexes.tolist()):
        if keep[place] and advances[index].sequence_id in failed:
            keep[place] = False
            errors[index] = failed[advances[index].sequence_id]
    return Selection(chosen.indexes[keep], chosen.rows[keep], chosen.num_tokens[keep], chosen.sample[keep], errors)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a step's outputs that tell prompt tokens' logprobs, in the order of the advances."""

    outputs: Rows  # [prompt tokens] row among the model's outputs
    ids: Rows  # [prompt tokens] the token behind it
    places: Rows  # [prompt tokens] which of the chosen advances it belongs to, ascending


@dataclass(frozen=True, slots=True)
class Built:
    """A step's tensors, and what the model's outputs are for, which are those of `StepBatch.sample_rows`."""

    batch: StepBatch
    samples: Rows  # [samples] row among the outputs, in the order of the advances
    prompt: PromptRows | None


def build(table: SequenceTable, chosen: Selection, device: torch.device) -> Built:
    """The step's tensors. There must be at least one advance."""
    rows, counts = chosen.rows, chosen.num_tokens
    block_tokens = table.limits.block_tokens
    computed = table.computed[rows]
    contexts = computed + counts
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    max_query = int(counts.max())
    max_context = int(contexts.max())
    if max_query == 1:
        token_rows, positions = rows, computed
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(computed - query_starts[:-1], counts)
    last = query_starts[1:][chosen.sample].astype(np.int64) - 1
    outputs = np.zeros(query_starts[-1], np.bool_)
    outputs[last] = True
    asks = table.sampling["prompt_logprobs"][rows]
    of_prompt: Rows | None = None
    if asks.any():
        in_prompt = (positions >= table.source[token_rows]) & (positions + 1 < table.prompt[token_rows])
        is_prompt = np.repeat(asks, counts) & in_prompt
        of_prompt = np.flatnonzero(is_prompt)
        outputs |= is_prompt
    output_of_row = np.cumsum(outputs) - 1
    prompt = None
    if of_prompt is not None and len(of_prompt):
        ids = table.token_ids[token_rows[of_prompt], positions[of_prompt] + 1].astype(np.int64)
        prompt = PromptRows(output_of_row[of_prompt], ids, np.repeat(np.arange(len(rows)), counts)[of_prompt])
    blocks = table.block_ids[token_rows, positions // block_tokens].astype(np.int64)

    def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    batch = StepBatch(
        token_ids=tensor(table.token_ids[token_rows, positions].astype(np.int64)),
        positions=tensor(positions),
        slots=tensor(blocks * block_tokens + positions % block_tokens),
        query_starts=tensor(query_starts),
        context_lens=tensor(contexts.astype(np.int32)),
        block_tables=tensor(table.block_ids[rows, : -(-max_context // block_tokens)]),
        sample_rows=tensor(np.flatnonzero(outputs)),
        max_query_tokens=max_query,
        max_context_tokens=max_context,
        source_lens=tensor(table.source[rows].astype(np.int32)) if table.limits.max_source_tokens else None,
    )
    return Built(batch, output_of_row[last], prompt)
