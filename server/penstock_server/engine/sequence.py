"""The worker's state of every sequence: its tokens, its blocks, how far it is computed, how it is sampled.

One row per sequence in numpy arrays, so that a step's tensors are made by indexing, without loops over tokens. A
sequence that broke a rule of the protocol, or whose logits were not finite, is kept with its reason until it is freed.
INVARIANT: the block table of a row is 0 beyond its `num_blocks`; `computed` ≤ `known` ≤ the row's width.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.engine.host_batch import HostAdapters
from penstock_server.engine.restriction import Restriction
from penstock_server.engine.sampling import SAMPLING_FIELDS, Composition, compose, names_tokens, record, refusal
from penstock_server.errors import ConfigError, ImageError
from penstock_server.models.adapter import Adapters
from penstock_server.protocol.plan import Adapter, Failure, ImageSpan, NewSequence, Sampling
from penstock_server.vision.encoder import ImageEncoder, PlacedImage


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Limits that hold for every sequence."""

    vocab_size: int
    block_tokens: int
    num_blocks: int
    max_sequence_tokens: int
    num_rows: int  # sequences expected at a time; the table grows by copying when there are more
    max_source_tokens: int = 0  # 0: no part of a sequence is read by an encoder
    has_answers: bool = True  # something follows a source; otherwise all of a sequence is source
    has_token_types: bool = False  # tokens of a second text are told apart
    has_whole_prompts: bool = False  # all tokens of a prompt attend to each other, so they are computed together
    # States of sequences that the model holds: the most sequences at a time, each with its row as its slot. 0: the
    # model keeps no state.
    num_state_slots: int = 0
    num_snapshots: int = 0  # snapshots of such states


class SequenceTable:
    """All sequences of one stream of steps."""

    def __init__(
        self, limits: TableLimits, adapters: Adapters | None = None, encoder: ImageEncoder | None = None
    ) -> None:
        """adapters, encoder: None: no sequence may have an adapter, or images."""
        self.limits = limits
        self.adapters = adapters
        self.encoder = encoder
        self._images_of: dict[int, list[PlacedImage]] = {}  # by row; kept until the row is released
        self._adapter_of: dict[int, Any] = {}  # by row; kept loaded until the row is released
        self._salts_of: dict[int, list[tuple[int, int | bytes]]] = {}  # by row
        self._cache_salt_of: dict[int, int] = {}  # by row
        self._composition: tuple[bytes, Composition] | None = None
        self._naming: dict[int, Sampling] = {}  # by row: samplings that name single tokens
        self._restrictions: dict[int, Restriction] = {}  # by row
        self._row_of: dict[int, int] = {}
        self._failures: dict[int, Failure] = {}
        num_rows = limits.num_state_slots or limits.num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        # One more, because the last token of a sequence at full length is known but never computed.
        width = limits.max_sequence_tokens + 1
        self.token_ids = _untouched_zeros((num_rows, width))
        self.block_ids = _untouched_zeros((num_rows, -(-width // limits.block_tokens)))
        self.known = np.zeros(num_rows, np.int64)
        self.prompt = np.zeros(num_rows, np.int64)  # leading known tokens that are the prompt
        self.source = np.zeros(num_rows, np.int64)  # leading prompt tokens that the encoder reads
        self.first_text = np.zeros(num_rows, np.int64)  # leading known tokens of token type 0
        self.computed = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.adapter = np.zeros(num_rows, np.int64)  # its id; 0: none
        self.images_end = np.zeros(num_rows, np.int64)  # tokens up to the end of its last image; 0: it has none
        self.shift = np.zeros(num_rows, np.int64)  # what positions behind its images are smaller by than in text
        self.sampling = np.zeros(num_rows, SAMPLING_FIELDS)
        # A number that no other residency (from `add` until the row is released) ever has; 0: the row is free.
        self.residency = np.zeros(num_rows, np.int64)
        self._num_residencies = 0
        self._scoring_prompts: set[int] = set()  # rows

    @property
    def num_scoring_prompts(self) -> int:
        """Sequences that asked for logprobs of their prompt."""
        return len(self._scoring_prompts)

    @property
    def has_adapters(self) -> bool:
        """Whether any sequence has one."""
        return bool(self._adapter_of)

    @property
    def has_images(self) -> bool:
        """Whether any sequence has one."""
        return bool(self._images_of)

    def rows(self, sequence_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """[sequence_ids]: the row of each; -1 where the sequence is unknown or has failed."""
        return np.fromiter((self._row_of.get(i, -1) for i in sequence_ids), np.int64, len(sequence_ids))

    def _place(self, new: NewSequence) -> tuple[list[PlacedImage], str]:
        """The images of a sequence, or which rule they break. Raises ImageError."""
        if self.encoder is None:
            return [], "has images, which the model does not read"
        images = self.encoder.placed(new.images)
        return images, _image_refusal(new, images)

    def _adapter(self, new: NewSequence) -> Adapter | None:
        """The one that it names, or the model's own."""
        if new.adapter is not None or self.adapters is None:
            return new.adapter
        return self.adapters.own if new.images or not self.adapters.own_is_of_images else None

    @property
    def has_attended_images(self) -> bool:
        """Whether tokens behind an image attend to it in layers of their own."""
        return self.encoder is not None and self.encoder.pool is not None

    def failure(self, sequence_id: int) -> Failure:
        """Why a sequence without a row cannot advance."""
        return self._failures.get(sequence_id) or Failure(sequence_id, "unknown sequence id")

    def add(self, new: NewSequence) -> None:
        """Add a sequence. One that breaks a rule is kept as failed."""
        sequence_id = new.sequence_id
        if sequence_id in self._row_of:
            self.fail(sequence_id, "sequence id is already in use")
            return
        if sequence_id in self._failures:
            return
        images: list[PlacedImage] = []
        adapter, loaded = self._adapter(new), None
        reason = self._refusal(new)
        if not reason and new.images:
            try:
                images, reason = self._place(new)
            except ImageError as error:  # they were encoded before, and the scheduler has kept room for them
                reason = str(error)
        if not reason and adapter is not None and self.adapters is not None:
            try:
                loaded = self.adapters.get(adapter)
            except ConfigError as error:  # an earlier worker has loaded it, but its folder has changed since
                reason = f"its adapter cannot be loaded: {error}"
        if not reason and self.limits.num_state_slots and not self._free_rows:
            reason = f"finds none of the {self.limits.num_state_slots} state slots free"
        if reason:
            self._failures[sequence_id] = Failure(sequence_id, reason)
            return
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._row_of[sequence_id] = row
        self._composition = None
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.known[row] = len(new.token_ids)
        self.computed[row] = new.num_computed_tokens
        self.num_blocks[row] = len(new.block_ids)
        self.block_ids[row, : len(new.block_ids)] = new.block_ids
        self.prompt[row] = new.num_prompt_tokens
        self.source[row] = new.num_source_tokens
        self.first_text[row] = len(new.token_ids) - new.num_second_text_tokens
        if adapter is not None and loaded is not None:
            self.adapter[row] = adapter.id
            self._adapter_of[row] = loaded
        if images:
            self._images_of[row] = images
            self.images_end[row] = images[-1].end
            self.shift[row] = images[-1].shift
        if salts := _salts(adapter, new.images):
            self._salts_of[row] = salts
        if new.cache_salt is not None:
            self._cache_salt_of[row] = new.cache_salt
        self.sampling[row] = record(new.sampling)
        if names_tokens(new.sampling):
            self._naming[row] = new.sampling
        if new.sampling.allowed_tokens or new.sampling.bad_words:
            self._restrictions[row] = Restriction(new.sampling, self.limits.vocab_size)
        if new.sampling.prompt_logprobs:
            self._scoring_prompts.add(row)
        self._num_residencies += 1
        self.residency[row] = self._num_residencies

    def free(self, sequence_id: int) -> bool:
        """Forget a sequence, failed or not. Returns false when it is unknown."""
        if self._failures.pop(sequence_id, None) is not None:
            return True
        return self._release(sequence_id)

    def fail(self, sequence_id: int, reason: str) -> None:
        """End a sequence: every later advance of it fails with this reason, until it is freed."""
        self._release(sequence_id)
        self._failures[sequence_id] = Failure(sequence_id, reason)

    def append_blocks(
        self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], block_ids: npt.NDArray[np.uint32]
    ) -> None:
        """Append counts [rows] blocks to the rows' block tables; block_ids [sum of counts] are in the rows' order."""
        begins = np.cumsum(counts) - counts
        columns = np.arange(len(block_ids)) + np.repeat(self.num_blocks[rows] - begins, counts)
        self.block_ids[np.repeat(rows, counts), columns] = block_ids
        self.num_blocks[rows] += counts

    def block_refusal(self, block_ids: Sequence[int], num_blocks: int) -> str:
        """Why a sequence of `num_blocks` blocks in all cannot have these; empty: it can."""
        if num_blocks > self.block_ids.shape[1]:
            return f"has {num_blocks} blocks, at most {self.block_ids.shape[1]} are allowed"
        if len(block_ids) and (max(block_ids) >= self.limits.num_blocks or min(block_ids) < 0):
            return f"block id {max(block_ids)} is outside of the pool of {self.limits.num_blocks}"
        return ""

    def composition(self, rows: npt.NDArray[np.int64]) -> Composition:
        """How rows are sampled; the same object as last time when nothing has changed."""
        key = rows.tobytes()
        if self._composition is None or self._composition[0] != key:
            named = list(enumerate(rows.tolist()))
            naming = {place: self._naming[row] for place, row in named if row in self._naming}
            restrictions = {place: self._restrictions[row] for place, row in named if row in self._restrictions}
            self._composition = (key, compose(self.sampling[rows], naming, restrictions))
        return self._composition[1]

    def adapters_of(self, token_rows: npt.NDArray[np.int64]) -> HostAdapters:
        """The adapters of tokens, given by their rows."""
        ids, first, places = np.unique(self.adapter[token_rows], return_index=True, return_inverse=True)
        num_without = int(ids[0] == 0)
        loaded = [self._adapter_of[row] for row in token_rows[first[num_without:]].tolist()]
        return HostAdapters.of(loaded, places.astype(np.int64) - num_without)

    def images_of(self, rows: npt.NDArray[np.int64]) -> list[Sequence[PlacedImage]]:
        """[rows]: the images of each."""
        return [self._images_of.get(row, ()) for row in rows.tolist()]

    def salts(self, row: int, start: int, end: int) -> tuple[int | bytes, ...]:
        """What else than tokens decides what the model computes from some token between `start` and `end` on: the
        sequence's adapter, and the images that begin there."""
        return tuple(salt for offset, salt in self._salts_of.get(row, ()) if start <= offset < end)

    def cache_salt(self, row: int) -> int | None:
        return self._cache_salt_of.get(row)

    def splits_images(self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """[rows]: whether the first `ends` [rows] tokens end inside of an image whose tokens attend to each other. Rows
        may be -1."""
        found = np.zeros(len(rows), np.bool_)
        for place in np.flatnonzero((rows >= 0) & (ends < self.images_end[rows])).tolist():
            images = self._images_of.get(int(rows[place]), ())
            found[place] = any(placed.is_split_at(int(ends[place])) for placed in images)
        return found

    def splits_prompts(self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """[rows]: whether the first `ends` [rows] tokens end inside of a prompt whose tokens attend to each other."""
        return self.limits.has_whole_prompts & (ends < self.prompt[rows])

    def first_ids(self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[rows, longest]: the tokens before `ends` [rows] that are not the encoder's; shorter rows are padded with
        their first."""
        first, end = self.source[rows][:, None], ends[:, None]
        places = first + np.arange(int((end - first).max()))
        return self.token_ids[rows[:, None], np.where(places < end, places, first)].astype(np.int64)

    def generated_ids(
        self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """[rows, longest ≥ 1]: the tokens from the end of each prompt to `ends` [rows], and whether each is real."""
        num = ends - self.prompt[rows]
        columns = np.arange(max(1, int(num.max())))
        real = columns < num[:, None]
        places = np.where(real, self.prompt[rows][:, None] + columns, 0)
        return self.token_ids[rows[:, None], places].astype(np.int64), real

    def known_ids(self, row: int) -> npt.NDArray[np.int32]:
        """[known]: a sequence's known tokens."""
        return self.token_ids[row, : self.known[row]]

    def write_drafts(self, row: int, draft: npt.NDArray[np.int32]) -> None:
        """Writes draft tokens behind the known tokens; they do not become known."""
        self.token_ids[row, self.known[row] : self.known[row] + len(draft)] = draft

    def drafts(self, row: int, count: int) -> npt.NDArray[np.int32]:
        """[count]: the tokens behind the known ones."""
        return self.token_ids[row, self.known[row] : self.known[row] + count]

    def last_generated(self, row: int, end: int, num_tokens: int) -> npt.NDArray[np.int32]:
        """[≤ num_tokens]: the last generated tokens of a row before `end`."""
        return self.token_ids[row, max(int(self.prompt[row]), end - num_tokens) : end]

    def _release(self, sequence_id: int) -> bool:
        row = self._row_of.pop(sequence_id, None)
        if row is None:
            return False
        self.block_ids[row, : self.num_blocks[row]] = 0
        self._naming.pop(row, None)
        self._restrictions.pop(row, None)
        self._scoring_prompts.discard(row)
        self._adapter_of.pop(row, None)
        self.adapter[row] = 0
        self._images_of.pop(row, None)
        self._salts_of.pop(row, None)
        self._cache_salt_of.pop(row, None)
        self.images_end[row] = self.shift[row] = 0
        self.residency[row] = 0
        self._free_rows.append(row)
        return True

    def _refusal(self, new: NewSequence) -> str:
        limits, known = self.limits, len(new.token_ids)
        if known == 0:
            return "has no tokens"
        if known > limits.max_sequence_tokens:
            return f"has {known} tokens, at most {limits.max_sequence_tokens} are allowed"
        if not 1 <= new.num_prompt_tokens <= known:
            return f"has {new.num_prompt_tokens} prompt tokens among {known} known tokens"
        if new.num_source_tokens or limits.max_source_tokens:
            reason = self._source_refusal(new)
            if reason:
                return reason
        if new.num_second_text_tokens > (known if limits.has_token_types else 0):
            has_types = "" if limits.has_token_types else ", but the model has no token types"
            return f"has {new.num_second_text_tokens} tokens of a second text among {known} known tokens{has_types}"
        if new.num_computed_tokens > known:
            return f"has {new.num_computed_tokens} computed tokens, but only {known} are known"
        if new.num_computed_tokens > len(new.block_ids) * limits.block_tokens:
            return f"has {new.num_computed_tokens} computed tokens in {len(new.block_ids)} blocks"
        # Without snapshots, as in warm-up, the states are those of the slot's last sequence.
        if limits.num_snapshots and new.num_computed_tokens and new.snapshot is None:
            return f"has {new.num_computed_tokens} computed tokens, but no snapshot of its states"
        if new.snapshot is not None and new.snapshot >= limits.num_snapshots:
            return f"starts with snapshot {new.snapshot}, but there are {limits.num_snapshots} snapshots"
        if new.adapter is not None and self.adapters is None:
            return "has an adapter, but the model was loaded without adapters"
        if max(new.token_ids) >= limits.vocab_size or min(new.token_ids) < 0:
            return f"token id {max(new.token_ids)} is outside of the vocabulary of {limits.vocab_size}"
        return self.block_refusal(new.block_ids, len(new.block_ids)) or refusal(new.sampling, limits.vocab_size)

    def _source_refusal(self, new: NewSequence) -> str:
        num, limit = new.num_source_tokens, self.limits.max_source_tokens
        if not limit:
            return f"has {num} source tokens, but the model has no encoder"
        if num == 0:
            return "has no source tokens, but the model has an encoder"
        if num > limit:
            return f"has {num} source tokens, at most {limit} are allowed"
        if not self.limits.has_answers:
            if num != len(new.token_ids):
                return f"has {num} source tokens among {len(new.token_ids)}, but an encoder reads all of them"
        elif num >= new.num_prompt_tokens:
            return f"has {num} source tokens, so its prompt must have more than {new.num_prompt_tokens}"
        if 0 < new.num_computed_tokens < num:
            return f"has {new.num_computed_tokens} computed tokens of a source of {num}, which are computed together"
        return ""

    def _grow(self) -> None:
        old = len(self.known)
        width, blocks = int(self.known.max()), int(self.num_blocks.max())
        for name in (
            "token_ids",
            "block_ids",
            "known",
            "prompt",
            "source",
            "first_text",
            "computed",
            "num_blocks",
            "adapter",
            "images_end",
            "shift",
            "sampling",
            "residency",
        ):
            before = getattr(self, name)
            used = {"token_ids": width, "block_ids": blocks}.get(name)
            if used is None:
                after = np.zeros(2 * old, before.dtype)
                after[:old] = before
            else:
                after = _untouched_zeros((2 * old, before.shape[1]))
                after[:old, :used] = before[:, :used]
            setattr(self, name, after)
        self._free_rows.extend(range(2 * old - 1, old - 1, -1))


def _untouched_zeros(shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """Zeros whose pages take no memory before they are written. Those of numpy may: the C library clears memory that it
    reuses, and large arrays have huge pages."""
    dtype = np.dtype(np.int32)
    num_bytes = max(1, math.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def _salts(adapter: Adapter | None, images: Sequence[ImageSpan]) -> list[tuple[int, int | bytes]]:
    """By offset, what `SequenceTable.salts` returns."""
    of_adapter: list[tuple[int, int | bytes]] = [] if adapter is None else [(0, adapter.id)]
    return of_adapter + [(span.offset, span.image.hash) for span in images]


def _image_refusal(new: NewSequence, images: Sequence[PlacedImage]) -> str:
    end = 0
    for image in images:
        if image.offset < end or list(new.token_ids[image.offset : image.end]) != image.image.token_ids.tolist():
            return f"has an image at token {image.offset}, where the image's tokens are not"
        end = image.end
    return ""
