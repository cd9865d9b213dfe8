"""A step's batch as arrays on the host, before one copy brings it to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.attention.interface import CrossAttentionImages, StepAdapters, StepBatch, WrittenImage
from penstock_server.engine.transfer import Put, Upload

Rows = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostAdapters:
    """The LoRA adapters of a step's tokens."""

    loaded: Sequence[Any]  # the results of `Adapters.load`
    of_tokens: Rows  # as in `StepAdapters`
    addresses: Rows | None = None  # GPU only: addresses of the tables of adapters

    @classmethod
    def of(cls, loaded: Sequence[Any], of_tokens: Rows) -> HostAdapters:
        on_device = [adapter.address for adapter in loaded if hasattr(adapter, "address")]
        return cls(loaded, of_tokens, np.array(on_device, np.int64) if on_device else None)

    def put(self, put: Put) -> StepAdapters:
        return StepAdapters(self.loaded, put(self.of_tokens), None if self.addresses is None else put(self.addresses))

    def padded(self, num_sequences: int) -> HostAdapters:
        """Pads the arrays of a decode step on a GPU to `num_sequences` sequences. Added sequences have no adapter."""
        addresses = np.zeros(0, np.int64) if self.addresses is None else self.addresses
        shape = (num_sequences,)
        return HostAdapters(self.loaded, _filled(self.of_tokens, shape, -1), _filled(addresses, shape))


@dataclass(frozen=True, slots=True)
class HostCrossAttentionImages:
    """Has the fields of `CrossAttentionImages`."""

    rows: Rows
    batch: HostBatch
    written: Sequence[WrittenImage]  # on the device
    slots: Rows

    def put(self, put: Put) -> CrossAttentionImages:
        return CrossAttentionImages(put(self.rows), self.batch.put(put), self.written, put(self.slots))


NO_ADAPTERS = HostAdapters((), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Has the fields of `StepBatch`, in the same shapes and data types."""

    token_ids: Rows
    positions: Rows
    slots: Rows
    query_starts: Lengths
    context_lens: Lengths
    block_tables: Lengths
    sample_rows: Rows
    max_query_tokens: int
    max_context_tokens: int
    source_lens: Lengths | None = None
    sources: HostBatch | None = None
    token_types: Rows | None = None
    adapters: HostAdapters | None = None
    image_places: Rows | None = None
    image_embeddings: Tensor | None = None  # on the device
    image_positions: Rows | None = None
    ends: Lengths | None = None
    seen: HostCrossAttentionImages | None = None
    state_slots: Rows | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether each token gives an output, and attends to those before it: decodes, with or without draft tokens,
        and chunks of prompts whose logprobs are asked for. With states, the tokens of a sequence cannot be computed as
        sequences of their own."""
        has_images = self.image_places is not None or self.ends is not None
        is_split = self.state_slots is not None and self.num_tokens > self.num_sequences
        return (
            not has_images
            and not is_split
            and self.sources is None
            and self.seen is None
            and self.num_tokens == len(self.sample_rows) > 0
        )

    def with_single_rows(self) -> HostBatch:
        """A decode step in which each token is a sequence of its own, whose context ends with it. It computes the same:
        a layer stores the keys of all tokens of a step before it reads any."""
        if self.num_tokens == self.num_sequences:
            return self
        counts = np.diff(self.query_starts)
        owners = np.repeat(np.arange(self.num_sequences), counts)
        num_behind = self.query_starts[1:][owners] - np.arange(1, self.num_tokens + 1, dtype=np.int32)
        return replace(
            self,
            query_starts=np.arange(self.num_tokens + 1, dtype=np.int32),
            context_lens=(self.context_lens[owners] - num_behind).astype(np.int32, copy=False),
            block_tables=self.block_tables[owners],
            max_query_tokens=1,
            source_lens=None if self.source_lens is None else self.source_lens[owners],
        )

    def put(self, put: Put) -> StepBatch:
        """On the device. The arrays are put in the order of the fields."""
        values = [(name, getattr(self, name)) for name in _FIELDS]
        step: dict[str, Any] = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in values}
        for name in ("sources", "adapters", "seen"):
            if step[name] is not None:
                step[name] = step[name].put(put)
        return StepBatch(**step)

    def copied_to(self, device: torch.device) -> StepBatch:
        upload = Upload(device)
        step = self.put(upload.add)
        upload.start()
        return step

    def padded(
        self, num_sequences: int, max_context_tokens: int, block_tokens: int, *, has_adapters: bool = False
    ) -> HostBatch:
        """A decode step padded to `num_sequences` sequences and to contexts of at most `max_context_tokens` tokens.
        The tokens of the added sequences are not stored, their contexts are empty, and they have no adapter."""
        adapters = (self.adapters or NO_ADAPTERS).padded(num_sequences) if has_adapters else None
        shape = num_sequences, -(-max_context_tokens // block_tokens)
        return HostBatch(
            token_ids=_filled(self.token_ids, shape[:1]),
            positions=_filled(self.positions, shape[:1]),
            slots=_filled(self.slots, shape[:1], -1),
            query_starts=np.arange(num_sequences + 1, dtype=np.int32),
            context_lens=_filled(self.context_lens, shape[:1]),
            block_tables=_filled(self.block_tables, shape),
            sample_rows=np.arange(num_sequences),
            max_query_tokens=1,
            max_context_tokens=max_context_tokens,
            source_lens=None if self.source_lens is None else _filled(self.source_lens, shape[:1]),
            adapters=adapters,
            state_slots=None if self.state_slots is None else _filled(self.state_slots, shape[:1], -1),
        )


_FIELDS = tuple(field.name for field in fields(HostBatch))


def _filled(array: npt.NDArray[Any], shape: tuple[int, ...], value: int = 0) -> npt.NDArray[Any]:
    """The array, enlarged to this shape. PERF: numpy's `pad` takes ten times as long for small arrays."""
    larger = np.full(shape, value, array.dtype)
    larger[tuple(slice(0, size) for size in array.shape)] = array
    return larger


def split(whole: HostBatch, source_lens: Rows) -> tuple[HostBatch, Rows]:
    """The batch of the tokens after the sources, with the batch of the source tokens, if there are any, as its
    `sources`; and for each token of the whole batch its number among the tokens after the sources.

    source_lens [sequences]. The positions of a token after a source count from the end of the source.
    """
    counts = np.diff(whole.query_starts)
    num_source = np.clip(source_lens - whole.context_lens + counts, 0, counts)  # [sequences] of this step
    source_len_of_token = np.repeat(source_lens, counts)
    is_source = whole.positions < source_len_of_token
    answer_tokens = np.cumsum(~is_source) - 1
    lens = source_lens.astype(np.int32)
    sources = _part(whole, is_source, num_source, lens)
    sources = replace(sources, context_lens=lens[num_source > 0], sample_rows=whole.sample_rows[:0])
    answers = _part(whole, ~is_source, counts - num_source, lens)
    return replace(
        answers,
        positions=answers.positions - source_len_of_token[~is_source],
        sample_rows=answer_tokens[whole.sample_rows],
        sources=sources if len(sources.token_ids) else None,
    ), answer_tokens


def _part(whole: HostBatch, is_mine: npt.NDArray[np.bool_], counts: Rows, source_lens: Lengths) -> HostBatch:
    """The batch of some tokens. counts [sequences]: how many of them each sequence has."""
    has_tokens = counts > 0
    query_starts = np.zeros(np.count_nonzero(has_tokens) + 1, np.int32)
    np.cumsum(counts[has_tokens], out=query_starts[1:])
    return replace(
        whole,
        token_ids=whole.token_ids[is_mine],
        positions=whole.positions[is_mine],
        slots=whole.slots[is_mine],
        query_starts=query_starts,
        context_lens=whole.context_lens[has_tokens],
        block_tables=whole.block_tables[has_tokens],
        max_query_tokens=int(counts.max()),
        source_lens=source_lens[has_tokens],
    )
