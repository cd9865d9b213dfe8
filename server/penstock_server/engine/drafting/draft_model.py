"""Drafts from a smaller model of the same vocabulary, which the first rank runs before the step that verifies them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock_server.engine.batch import text_batch
from penstock_server.engine.drafting.pooled import Drafted, PooledDrafter
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable
from penstock_server.models.interface import CausalModel


class DraftModel(PooledDrafter):
    """Greedy continuations by a model of its own."""

    def __init__(self, model: CausalModel, vocab_size: int, device: torch.device) -> None:
        """vocab_size: of the model that verifies; drafts are smaller. device: of both models."""
        super().__init__(model, device)
        self._causal = model
        self._vocab_size = vocab_size

    def next(self, table: SequenceTable, rows: Rows, starts: Rows, counts: Rows, last: Drafted | None) -> Drafted:
        batch, _ = text_batch(table, rows, starts, counts)
        # The vocabulary of the model may be padded further than that of the draft model.
        np.minimum(batch.token_ids, self._causal.traits.vocab_size - 1, out=batch.token_ids)
        step = batch.copied_to(self.device)
        if last is not None:
            step = replace(step, token_ids=last.ids)
        found = self._causal.forward(step)
        return Drafted(self._causal.logits(found)[:, : self._vocab_size].argmax(1), found)
