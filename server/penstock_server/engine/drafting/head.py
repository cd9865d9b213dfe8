"""Drafts from a head: layers that read what the model computes at each position and the token that follows it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock_server.engine.batch import text_batch
from penstock_server.engine.drafting.pooled import PooledDrafter, PooledModel
from penstock_server.engine.host_batch import HostBatch, Rows
from penstock_server.engine.sequence import SequenceTable


class Head(PooledModel, Protocol):
    """A head with its pool, which also holds what it reads of the model."""

    def forward(self, batch: HostBatch, following: Tensor, outputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """following [tokens]: the token behind each. outputs [tokens, hidden]: of this head, in place of what the model
        computes there. Returns the most probable tokens [rows] of the model's vocabulary, and the outputs
        [rows, hidden] that predict them."""
        ...


class HeadDrafter(PooledDrafter):
    """Greedy continuations by a head that reads the model. All ranks of the model run it."""

    is_sent = False
    num_unread = 1  # the model has not computed the last token, so there is nothing to read
    keeps_drafts = False  # what the model computes there takes the place of the head's own outputs

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._head = head

    def readable(self, table: SequenceTable, rows: Rows) -> Rows:
        return np.minimum(super().readable(table, rows), table.computed[rows])

    def next(
        self, table: SequenceTable, rows: Rows, starts: Rows, counts: Rows, outputs: Tensor | None
    ) -> tuple[Rows, Tensor]:
        batch, token_rows = text_batch(table, rows, starts, counts)
        following = table.token_ids[token_rows, batch.positions + 1]
        ids, found = self._head.forward(batch, torch.from_numpy(following).long(), outputs)
        return ids.numpy(), found
