"""Drafts from a head: layers that read what the model computes at each position and the token that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock_server.device.attention.interface import StepBatch
from penstock_server.engine.batch import text_batch
from penstock_server.engine.drafting.pooled import Drafted, PooledDrafter, PooledModel
from penstock_server.engine.host_batch import HostBatch, Rows
from penstock_server.engine.sequence import SequenceTable
from penstock_server.vision.encoder import PlacedImage


class Head(PooledModel, Protocol):
    """A head with its pool, which also holds what it reads of the model."""

    def forward(
        self, batch: HostBatch, step: StepBatch, outputs: Tensor | None, images: Sequence[Sequence[PlacedImage]]
    ) -> Drafted:
        """batch, step: on the host and on the device, where `token_ids` are the tokens behind the positions. outputs
        [tokens, hidden]: of this head, in place of what the model computes there. images [sequences]; empty: no
        sequence of the server has any."""
        ...


class HeadDrafter(PooledDrafter):
    """Greedy continuations by a head that reads the model. All ranks of the model run it."""

    is_sent = False
    num_unread = 1  # the model has not computed the last token, so there is nothing to read
    keeps_drafts = False  # what the model computes there takes the place of the head's own outputs

    def __init__(self, head: Head, device: torch.device) -> None:
        super().__init__(head, device)
        self._head = head

    def readable(self, table: SequenceTable, rows: Rows) -> Rows:
        return np.minimum(super().readable(table, rows), table.computed[rows])

    def next(self, table: SequenceTable, rows: Rows, starts: Rows, counts: Rows, last: Drafted | None) -> Drafted:
        batch, token_rows = text_batch(table, rows, starts, counts)
        following = table.token_ids[token_rows, batch.positions + 1].astype(np.int64)
        batch = replace(batch, token_ids=following)
        step = batch.copied_to(self.device)
        images = table.images_of(rows) if table.has_images else ()
        if last is None:
            return self._head.forward(batch, step, None, images)
        return self._head.forward(batch, replace(step, token_ids=last.ids), last.outputs, images)
