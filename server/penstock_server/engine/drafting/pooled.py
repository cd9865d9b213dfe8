"""Drafters that have a KV pool: they catch up on the tokens that they have not seen, and draft greedily from there.

The pool has the blocks of the model's: the token in a slot is the same in both, so block tables, prefix sharing and
preemption are the scheduler's. What was computed of wrong drafts is overwritten by the tokens that follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock_server.engine.drafting.interface import Tokens
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable
from penstock_server.engine.transfer import upload
from penstock_server.protocol.plan import Plan

# Unseen tokens that a step computes at most, of all sequences: a long prompt delays few tokens of others.
MAX_CATCH_UP_TOKENS = 256
# Behind the blocks of a pool that keeps what the model computed at each slot: recorded steps of a GPU have rows that
# are padding, whose slot is -1, the last one.
NUM_PADDING_BLOCKS = 1
_NO_TOKENS: Tokens = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Progress:
    """What the pool holds of a sequence."""

    residency: int
    computed: int = 0  # leading known tokens
    drafts: Tokens = field(default_factory=lambda: _NO_TOKENS)  # computed behind them
    num_blocks: int = 0  # leading blocks that `prefix` covers
    prefix: int = 0  # the hash of their tokens


class PooledModel(Protocol):
    """What drafts: the parts of `CausalModel` that memory planning needs."""

    caches: list[Tensor]

    @property
    def max_position_tokens(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        """With its padding blocks."""
        ...

    @property
    def kv_bytes_per_block(self) -> int: ...

    def allocate_cache(self, num_blocks: int) -> None: ...

    def serve_up_to(self, max_sequence_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Drafted:
    """What follows one token of each row, on the device."""

    ids: Tensor  # [rows] int64: the most probable token of the model's vocabulary
    outputs: Tensor  # [rows, hidden] that predict it

    def select(self, places: Rows) -> Drafted:
        if len(places) == len(self.ids):
            return self
        picked = upload(places, self.ids.device)
        return Drafted(self.ids[picked], self.outputs[picked])


class PooledDrafter(ABC):
    """Greedy continuations of the tokens that the pool holds. Implements `Drafter`."""

    is_sent = True
    is_lookup = False
    extends_lookup = False
    reads_outputs = False
    num_unread = 0  # last known tokens that are not computed yet when a draft begins
    keeps_drafts = True  # what was computed of a draft holds when it has become a token

    def __init__(self, model: PooledModel, device: torch.device) -> None:
        """model: loaded on this rank alone, unless all ranks draft."""
        self.model = model
        self.device = device
        self.num_bytes = model.weight_bytes
        self.kv_bytes_per_block = model.kv_bytes_per_block
        self._progress: dict[int, _Progress] = {}  # by row
        self._prefixes: dict[int, int] = {}  # by block: the hash of all tokens up to its end when it was filled

    def readable(self, table: SequenceTable, rows: Rows) -> Rows:
        """[rows]: the leading tokens that can be computed."""
        return table.known[rows] - self.num_unread

    @abstractmethod
    def next(self, table: SequenceTable, rows: Rows, starts: Rows, counts: Rows, last: Drafted | None) -> Drafted:
        """Computes `counts` [rows] tokens from `starts` [rows] on, and returns what follows each row's last one. last:
        these tokens, which are drafts and not in the table; None: they are known tokens."""
        ...

    def allocate_cache(self, num_blocks: int) -> None:
        self.model.allocate_cache(num_blocks)
        self._progress.clear()
        self._prefixes.clear()

    def clear(self) -> None:
        self._progress.clear()

    def observe(self, table: SequenceTable, rows: Rows, ends: Rows, outputs: Tensor) -> None:
        raise AssertionError("outputs are read from the pool")

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        """Empty for a sequence that has too many tokens to catch up on in this step, or is too long for the model."""
        drafts = [_NO_TOKENS for _ in rows]
        most = np.minimum(most, self.model.max_position_tokens - table.known[rows] + 1)
        progress = [self._progress_of(table, row) for row in rows.tolist()]
        computed = np.array([each.computed for each in progress], np.int64)
        counts = _shares(np.where(most > 0, self.readable(table, rows) - computed, 0).clip(min=0))
        places = np.flatnonzero(counts > 0)
        if not len(places):
            return drafts
        last = self.next(table, rows[places], computed[places], counts[places], None)
        for place in places.tolist():
            self._advance(table, int(rows[place]), progress[place], int(counts[place]))
        is_ready = computed[places] + counts[places] == table.known[rows[places]] - self.num_unread
        places, last = places[is_ready], last.select(np.flatnonzero(is_ready))
        found = [(places, last.ids)]  # for each pass; the GPU is awaited once, behind all of them
        for num_drafts in range(1, int(most[places].max(initial=0))):
            longer = np.flatnonzero(most[places] > num_drafts)
            places, last = places[longer], last.select(longer)
            starts = table.known[rows[places]] + num_drafts - 1 - self.num_unread
            last = self.next(table, rows[places], starts, np.ones(len(places), np.int64), last)
            found.append((places, last.ids))
        ids = torch.cat([each for _, each in found]).cpu().numpy().astype(np.int32)
        for place, token in zip(np.concatenate([each for each, _ in found]).tolist(), ids, strict=True):
            drafts[place] = np.append(drafts[place], token)
        if self.keeps_drafts:
            for place, draft in enumerate(drafts):
                progress[place].drafts = draft[:-1]  # the last one is not computed
        return drafts

    def rehearse(self, table: SequenceTable, plan: Plan) -> None:
        """Drafts for the sequences of a plan, to touch the memory that this needs: for those that catch up on the most
        tokens, then for all."""
        for new in plan.new_sequences:
            table.add(new)
        rows = table.rows(plan.advances.sequence_ids.tolist())
        rows = rows[(rows >= 0) & (table.known[rows] + 2 <= table.token_ids.shape[1])]
        table.computed[rows] = table.known[rows] - 1
        self.draft(table, rows, np.full(len(rows), 2))
        for row in rows.tolist():
            computed = max(0, int(table.known[row]) - 1 - self.num_unread)
            num_blocks = computed // table.limits.block_tokens
            self._progress[row] = _Progress(int(table.residency[row]), computed, num_blocks=num_blocks)
        self.draft(table, rows, np.full(len(rows), 2))
        self.clear()
        self._prefixes.clear()  # such plans name a block in several places

    def _progress_of(self, table: SequenceTable, row: int) -> _Progress:
        """Up to date: drafts that became tokens are computed. At least the last token to read is not."""
        progress = self._progress.get(row)
        if progress is None or progress.residency != table.residency[row]:
            progress = self._progress[row] = _Progress(int(table.residency[row]))
            self._find_prefix(table, row, progress)
        known, drafts = table.known_ids(row), progress.drafts
        same = drafts[: len(known) - progress.computed] == known[progress.computed :][: len(drafts)]
        num_right = len(same) if same.all() else int(same.argmin())
        progress.computed = max(0, min(progress.computed + num_right, len(known) - 1 - self.num_unread))
        progress.drafts = _NO_TOKENS
        return progress

    def _find_prefix(self, table: SequenceTable, row: int, progress: _Progress) -> None:
        """Skips the blocks that were filled with the sequence's tokens already: of a shared prefix, or by itself before
        it was preempted."""
        for prefix, block in self._blocks(table, row, progress, int(table.known[row]) - 1 - self.num_unread):
            if self._prefixes.get(block) != prefix:
                break
            progress.num_blocks, progress.prefix = progress.num_blocks + 1, prefix
        progress.computed = progress.num_blocks * table.limits.block_tokens

    def _advance(self, table: SequenceTable, row: int, progress: _Progress, count: int) -> None:
        """Notes that the next `count` known tokens are computed."""
        progress.computed += count
        for prefix, block in self._blocks(table, row, progress, progress.computed):
            self._prefixes[block] = prefix
            progress.num_blocks, progress.prefix = progress.num_blocks + 1, prefix

    def _blocks(self, table: SequenceTable, row: int, progress: _Progress, end: int) -> Sequence[tuple[int, int]]:
        """The blocks that the first `end` tokens fill behind those that `progress.prefix` covers: the hash of all
        tokens up to the end of each, and of what else they stand for, and its id."""
        size, prefix, found = table.limits.block_tokens, progress.prefix, []
        for index in range(progress.num_blocks, end // size):
            first, last = index * size, (index + 1) * size
            tokens = table.token_ids[row, first:last].tobytes()
            prefix = hash((prefix, tokens, table.salts(row, first, last)))
            found.append((prefix, int(table.block_ids[row, index])))
        return found


def _shares(missing: Rows) -> Rows:
    """[rows]: the tokens that each row computes of its missing ones. Rows that miss few come first."""
    order = np.argsort(missing, kind="stable")
    before = np.cumsum(missing[order]) - missing[order]
    shares = np.empty_like(missing)
    shares[order] = np.clip(MAX_CATCH_UP_TOKENS - before, 0, missing[order])
    return shares
