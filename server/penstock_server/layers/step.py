"""What the layers of one step are told beyond their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock_server.attention import ModelAttention
from penstock_server.attention.interface import StepAdapters, StepBatch
from penstock_server.kernels.state import StateRows


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step, and which of its rows a layer's input consists of."""

    batch: StepBatch
    metadata: Mapping[str, Any]  # by the name of an attention implementation: what it prepared for the batch
    rows: Tensor | None = None  # [rows of the input] int64 rows of the batch; None: all of them in order
    adapters: StepAdapters | None = None  # adapters of the rows of the input; None: no row has one
    seen: StepContext | None = None  # step of the rows that attend to images, see `CrossAttentionImages.batch`

    @property
    def states(self) -> StateRows:
        """The sequences of the step and their slots. The model keeps a state between tokens."""
        assert self.batch.state_slots is not None, "a step of such a model has slots"
        return StateRows(self.batch.query_starts, self.batch.context_lens, self.batch.state_slots)

    @classmethod
    def of(cls, batch: StepBatch, attention: ModelAttention) -> StepContext:
        """The context of a step's first layer."""
        seen = None if batch.seen is None else cls.of(batch.seen.batch, attention)
        return cls(batch, attention.prepare(batch), adapters=batch.adapters, seen=seen)

    def select(self, rows: Tensor) -> StepContext:
        """The context of an input that consists of these rows [rows] int64 of this context's input."""
        adapters = None if self.adapters is None else self.adapters.select(rows)
        return replace(self, rows=rows if self.rows is None else self.rows[rows], adapters=adapters)
