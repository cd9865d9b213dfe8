"""What the layers of one step are told beyond their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from penstock_server.device.attention import ModelAttention
from penstock_server.device.attention.interface import StepAdapters, StepBatch
from penstock_server.device.state import StateRows

AddAdapters = Callable[[Tensor, Tensor, StepAdapters], None]
"""Adds to y, a layer's product with x, what the rows' adapters add. x [rows, in_features], y [rows, columns]; with a
layer for each head, x and y [rows, heads, ...]. The embedding's x are token ids [rows]."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step, and the rows that a layer's input consists of."""

    batch: StepBatch
    metadata: Mapping[str, Any]  # by the name of an attention implementation: what it prepared for the batch
    adapters: StepAdapters | None = None  # adapters of the rows of the input; None: no row has one
    adders: Mapping[int, AddAdapters] = field(default_factory=dict)  # what adapters add, by the site
    seen: StepContext | None = None  # step of the rows that attend to images, see `CrossAttentionImages.batch`

    @property
    def states(self) -> StateRows:
        """The sequences of the step and their slots. The model keeps a state between tokens."""
        assert self.batch.state_slots is not None, "a step of such a model has slots"
        return StateRows(self.batch.query_starts, self.batch.context_lens, self.batch.state_slots)

    @classmethod
    def of(
        cls, batch: StepBatch, attention: ModelAttention, adders: Mapping[int, AddAdapters] | None = None
    ) -> StepContext:
        """The context of a step's first layer."""
        seen = None if batch.seen is None else cls.of(batch.seen.batch, attention)
        return cls(batch, attention.prepare(batch), batch.adapters, adders or {}, seen)

    def select(self, rows: Tensor) -> StepContext:
        """The context of an input that consists of these rows [rows] int64 of this context's input."""
        adapters = None if self.adapters is None else self.adapters.select(rows)
        return replace(self, adapters=adapters)

    def add_adapters(self, site: int | None, x: Tensor, y: Tensor) -> None:
        """Adds to y what the rows' adapters add at this site, see `AddAdapters`. None: the layer has no site."""
        if self.adapters is not None and site is not None:
            self.adders[site](x, y, self.adapters)
