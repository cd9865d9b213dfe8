"""From a plan's advances to one batch: which rows, which tokens, which slots.

An advance that breaks a rule fails its sequence alone and is left out of the batch. Everything is vectorized over
sequences and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock_server.engine.cross_attention import cross_attention_images
from penstock_server.engine.host_batch import HostBatch, Rows, split
from penstock_server.engine.sequence import SequenceTable
from penstock_server.protocol.plan import Advances, Failure
from penstock_server.vision.encoder import PlacedImage, image_tokens, text_positions


@dataclass(frozen=True, slots=True)
class Selection:
    """The advances of one plan that can run, and why the others cannot."""

    sequence_ids: npt.NDArray[np.uint64]  # [selected]
    rows: Rows  # [selected] row in the sequence table
    num_tokens: Rows  # [selected] rows of the model: known tokens, and drafts after them
    samples: Rows  # [samples] the selected advance of each sampled token, ascending
    failures: Sequence[Failure]
    max_drafts: Rows  # [selected] draft tokens that the plan allows
    num_drafts: Rows  # [selected] draft tokens among num_tokens; the advance samples after each of them, too
    by_model: npt.NDArray[np.bool_]  # [selected] whether a model or heads made its drafts
    has_drafts: bool = False

    @property
    def samples_all(self) -> bool:
        """Whether each advance samples one token."""
        return not self.has_drafts and len(self.samples) == len(self.rows)

    def offsets(self) -> Rows:
        """[samples]: the draft tokens of its advance that each sampled token follows."""
        if not self.has_drafts:
            return np.zeros(len(self.samples), np.int64)
        return np.arange(len(self.samples)) - np.searchsorted(self.samples, self.samples)


def select(table: SequenceTable, advances: Advances) -> Selection:
    """Bring the plan's last tokens into the table, append the new blocks, and fail the sequences whose advance breaks a
    rule. PERF: after the model has run, its weights are in the caches, and each operation here takes some microseconds;
    what few plans need is left out of the others, here and in `build`."""
    sequence_ids, rows = advances.sequence_ids, table.rows(advances.sequence_ids.tolist())
    num_tokens, num_new_blocks = advances.num_tokens.astype(np.int64), advances.num_new_blocks.astype(np.int64)
    sample, new_block_ids = advances.sample, advances.new_block_ids
    max_drafts = _max_drafts(advances)
    failures: dict[int, Failure] = {}
    is_allowed = _allowed(table, advances, rows, num_new_blocks, max_drafts)
    if len(advances.last_token_ids):
        places = rows[is_allowed]
        table.token_ids[places, table.known[places] - 1] = advances.last_token_ids[is_allowed]
    if not is_allowed.all():
        for index in np.flatnonzero(~is_allowed).tolist():
            sequence_id = int(sequence_ids[index])
            failures[sequence_id] = _failure(table, advances, index, int(rows[index]))
        for sequence_id in np.unique(sequence_ids[~is_allowed & (rows >= 0)]).tolist():
            table.fail(sequence_id, failures[sequence_id].reason)
        new_block_ids = new_block_ids[np.repeat(is_allowed, num_new_blocks)]
        sequence_ids, rows, num_tokens = sequence_ids[is_allowed], rows[is_allowed], num_tokens[is_allowed]
        num_new_blocks, sample, max_drafts = num_new_blocks[is_allowed], sample[is_allowed], max_drafts[is_allowed]
    if len(new_block_ids):
        table.append_blocks(rows, num_new_blocks, new_block_ids)
    if table.has_adapters and table.adapter[rows].any():
        # PERF: an adapter's weights are read once for adjacent rows.
        order = np.argsort(table.adapter[rows], kind="stable")
        sequence_ids, rows, num_tokens = sequence_ids[order], rows[order], num_tokens[order]
        sample, max_drafts = sample[order], max_drafts[order]
    samples, num_drafts, by_model = np.flatnonzero(sample), np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    return Selection(sequence_ids, rows, num_tokens, samples, list(failures.values()), max_drafts, num_drafts, by_model)


def _max_drafts(advances: Advances) -> Rows:
    """[advances]: the draft tokens that the plan allows."""
    if len(advances.num_draft_tokens):
        return advances.num_draft_tokens.astype(np.int64)
    return np.zeros(len(advances), np.int64)


def _allowed(
    table: SequenceTable, advances: Advances, rows: Rows, num_new_blocks: Rows, max_drafts: Rows
) -> npt.NDArray[np.bool_]:
    """[advances]: whether each keeps all rules. `rows` are -1 where the sequence is unknown or failed."""
    ends = table.computed[rows] + advances.num_tokens
    known = table.known[rows]
    num_blocks = table.num_blocks[rows] + num_new_blocks
    allowed: npt.NDArray[np.bool_] = (
        (rows >= 0)
        & (advances.num_tokens >= 1)
        & (ends <= known)
        & (num_blocks <= table.block_ids.shape[1])
        & (~advances.sample | (ends == known))
    )
    ends_with_drafts = ends
    if len(advances.num_draft_tokens):
        ends_with_drafts = ends + max_drafts
        allowed &= advances.sample | (max_drafts == 0)
    room = np.minimum(num_blocks * table.limits.block_tokens, table.limits.max_sequence_tokens)
    allowed &= ends_with_drafts <= room
    if table.limits.max_source_tokens:
        allowed &= ends >= table.source[rows]
    if table.has_images:
        allowed &= ~table.splits_images(rows, ends)
    if table.limits.has_whole_prompts:
        allowed &= ~table.splits_prompts(rows, ends)
    if len(advances.last_token_ids):
        allowed &= advances.last_token_ids < table.limits.vocab_size
    is_outside = advances.new_block_ids >= table.limits.num_blocks
    if is_outside.any():
        allowed[np.repeat(np.arange(len(rows)), num_new_blocks)[is_outside]] = False
    if len(set(rows.tolist())) < len(rows):
        allowed &= np.bincount(rows + 1)[rows + 1] == 1
    return allowed


def _failure(table: SequenceTable, advances: Advances, index: int, row: int) -> Failure:
    """Why an advance is not allowed."""
    sequence_id = int(advances.sequence_ids[index])
    return table.failure(sequence_id) if row < 0 else Failure(sequence_id, _reason(table, advances, index, row))


def _reason(table: SequenceTable, advances: Advances, index: int, row: int) -> str:
    """The rule that an advance of a sequence with a row breaks."""
    sequence_id = int(advances.sequence_ids[index])
    if (advances.sequence_ids == sequence_id).sum() > 1:
        return "two advances in one plan"
    first = int(advances.num_new_blocks[:index].sum())
    new_block_ids = advances.new_block_ids[first : first + int(advances.num_new_blocks[index])].tolist()
    num_blocks = int(table.num_blocks[row]) + len(new_block_ids)
    if reason := table.block_refusal(new_block_ids, num_blocks):
        return reason
    num_tokens, known = int(advances.num_tokens[index]), int(table.known[row])
    end, capacity = int(table.computed[row]) + num_tokens, num_blocks * table.limits.block_tokens
    num_drafts = int(_max_drafts(advances)[index])
    if num_tokens < 1:
        return "an advance of 0 tokens"
    if end > known:
        return f"an advance of {num_tokens} tokens to {end}, but only {known} are known"
    if end < table.source[row]:
        return f"an advance to {end} tokens, but its source has {int(table.source[row])}, which are computed together"
    if table.splits_images(np.array([row]), np.array([end]))[0]:
        return f"an advance to {end} tokens, inside of an image, whose tokens are computed together"
    if table.splits_prompts(np.array([row]), np.array([end]))[0]:
        return f"an advance to {end} tokens, but its prompt has {int(table.prompt[row])}, which are computed together"
    if end > table.limits.max_sequence_tokens:
        return f"would have {end} tokens, at most {table.limits.max_sequence_tokens} are allowed"
    if end > capacity:
        return f"an advance to {end} tokens, but its blocks hold only {capacity}"
    if len(advances.last_token_ids) and advances.last_token_ids[index] >= table.limits.vocab_size:
        last, vocab_size = int(advances.last_token_ids[index]), table.limits.vocab_size
        return f"token id {last} is outside of the vocabulary of {vocab_size}"
    if num_drafts and not advances.sample[index]:
        return f"an advance with {num_drafts} draft tokens, but without a sample"
    if end + num_drafts > min(capacity, table.limits.max_sequence_tokens):
        return f"an advance to {end} tokens and {num_drafts} draft tokens, which do not fit into {capacity} slots"
    return f"a token is to be sampled after {end} tokens, but {known} are known"


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a step's outputs that give logprobs of prompt tokens, in the order of the advances."""

    outputs: Rows  # [prompt tokens] row among the model's outputs
    ids: Rows  # [prompt tokens] the token that follows it
    places: Rows  # [prompt tokens] the selected advance it belongs to, ascending


@dataclass(frozen=True, slots=True)
class Built:
    """A step's arrays, and the use of the model's outputs, which are the rows `HostBatch.sample_rows`."""

    batch: HostBatch
    samples: Rows  # [samples] row among the outputs, in the order of the advances
    prompt: PromptRows | None
    last_tokens: Rows  # [selected] the batch's last token of each advance


def text_batch(table: SequenceTable, rows: Rows, computed: Rows, counts: Rows) -> tuple[HostBatch, Rows]:
    """The batch of `counts` tokens of each row behind `computed` ones, which samples after the last of each; and the
    table's row of each token. There must be at least one row."""
    block_tokens = table.limits.block_tokens
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
    blocks = table.block_ids[token_rows, positions // block_tokens].astype(np.int64)
    batch = HostBatch(
        token_ids=table.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slots=blocks * block_tokens + positions % block_tokens,
        query_starts=query_starts,
        context_lens=contexts.astype(np.int32),
        block_tables=table.block_ids[rows, : -(-max_context // block_tokens)],
        sample_rows=query_starts[1:].astype(np.int64) - 1,
        max_query_tokens=max_query,
        max_context_tokens=max_context,
        state_slots=rows if table.limits.num_state_slots else None,
    )
    return batch, token_rows


def build(table: SequenceTable, chosen: Selection) -> Built:
    """The step's arrays. There must be at least one advance."""
    rows, counts = chosen.rows, chosen.num_tokens
    computed = table.computed[rows]
    batch, token_rows = text_batch(table, rows, computed, counts)
    positions = batch.positions
    last_tokens = batch.sample_rows
    outputs = last = last_tokens if chosen.samples_all else last_tokens[chosen.samples]
    if chosen.has_drafts:
        outputs = last = last - chosen.num_drafts[chosen.samples] + chosen.offsets()
    samples, prompt = np.arange(len(last)), None
    if table.num_scoring_prompts:
        of_prompt = np.flatnonzero(
            np.repeat(table.sampling["prompt_logprobs"][rows], counts)
            & (positions >= table.source[token_rows])
            & (positions + 1 < table.prompt[token_rows])
        )
        if len(of_prompt):
            outputs = np.union1d(last, of_prompt)
            samples = np.searchsorted(outputs, last)
            ids = table.token_ids[token_rows[of_prompt], positions[of_prompt] + 1].astype(np.int64)
            places = np.repeat(np.arange(len(rows)), counts)[of_prompt]
            prompt = PromptRows(np.searchsorted(outputs, of_prompt), ids, places)
    if outputs is not batch.sample_rows:
        batch = replace(batch, sample_rows=outputs)
    if table.has_adapters and table.adapter[rows].any():
        batch = replace(batch, adapters=table.adapters_of(token_rows))
    if table.has_images:
        if table.shift[rows].any():
            batch = replace(batch, positions=positions - table.shift[token_rows])
        if (computed < table.images_end[rows]).any() or (table.has_attended_images and table.images_end[rows].any()):
            batch = with_images(batch, table.images_of(rows), computed)
    if table.limits.has_whole_prompts and (computed < table.prompt[rows]).any():
        batch = replace(batch, ends=prompt_ends(positions, table.prompt[token_rows]))
    if not table.limits.has_answers:
        batch = replace(batch, source_lens=batch.context_lens)
        if table.limits.has_token_types:
            batch = replace(batch, token_types=(positions >= table.first_text[token_rows]).astype(np.int64))
    elif table.limits.max_source_tokens:
        batch, answer_tokens = split(batch, table.source[rows])
        last_tokens = answer_tokens[last_tokens]
    return Built(batch, samples, prompt, last_tokens)


def prompt_ends(positions: Rows, prompts: Rows) -> npt.NDArray[np.int32]:
    """[tokens] the ends of what tokens attend to if those of a prompt attend to each other. prompts: their lengths."""
    return np.where(positions < prompts, prompts, positions + 1).astype(np.int32)


def with_images(batch: HostBatch, images: Sequence[Sequence[PlacedImage]], computed: Rows) -> HostBatch:
    """The batch with its image tokens. images, computed [sequences]"""
    found = image_tokens(images, computed, batch.context_lens.astype(np.int64))
    if any(placed.shift for of_sequence in images for placed in of_sequence):
        positions = batch.positions.copy()
        for place, of_sequence in enumerate(images):
            if of_sequence:
                start, end = batch.query_starts[place : place + 2]
                positions[start:end] = text_positions(of_sequence, computed[place] + np.arange(end - start))
        batch = replace(batch, positions=positions)
    batch = replace(batch, seen=cross_attention_images(batch, images, computed))
    if found is None:
        return batch
    return replace(
        batch,
        image_places=found.places,
        image_embeddings=found.embeddings,
        image_positions=found.positions,
        ends=found.ends,
    )
