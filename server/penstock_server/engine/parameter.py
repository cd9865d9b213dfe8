"""The sampling parameters of a batch, grouped by the processors that rows need. Computed once per composition of the
batch, and used for many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock_server.engine.constraint import Masks
from penstock_server.engine.sampling import Composition, Entries
from penstock_server.engine.transfer import Put
from penstock_server.engine.truncation import Truncation

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Some:
    """Some rows of a chunk, ascending."""

    processed: Places  # on the host: indexes into `Parameters.processed`
    places: Tensor  # on the device: rows of the chunk


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Some rows that have a mask. Tensors are on the device."""

    places: Tensor  # [masked] ascending rows of the logits that are computed with them
    indices: Tensor | None  # [masked] into the step's masks; None: these are all of them

    def masks(self, words: Tensor) -> Masks:
        """Masks of these rows. words: the step's masks [masked rows of the step, words]."""
        return self.places, words if self.indices is None else words[self.indices]


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """Rows of which alternatives are wanted."""

    rows: Places  # [asking] their numbers, ascending
    top_n: Places  # [asking] how many alternatives each wants
    places: Tensor  # [asking] the same rows on the device, counted from the first row that is computed with them


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A range of `Parameters.processed`, whose rows are processed together. None: no row needs the processor."""

    rows: slice
    watermarked: Some | None
    repeating: Some | None  # with a repetition penalty
    counted: Some | None  # with a frequency or presence penalty
    masked: Masked | None
    drawn: Some | None  # sampled by a random number
    topped: Asking | None  # with alternatives of the processed distribution
    biases: tuple[Tensor, Tensor, Tensor] | None  # places, ids, values
    stops: Entries
    temperature: Tensor | None  # [rows, 1]
    repetition_penalty: Tensor | None  # [repeating]
    counting_penalties: tuple[Tensor, Tensor] | None  # frequency and presence, [counted] each
    truncation: Truncation | None  # [drawn]; None: no row samples from a part of the distribution
    drawn_is_truncated: Tensor | None  # [drawn]
    topped_is_truncated: Tensor | None  # [topped]


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """Rows by what sampling does to them. `plain` and `processed` are rows of the logits. Tensors are on the device."""

    composition: Composition  # the object that these parameters were computed from
    plain: Places  # rows that are greedy, without processors except a mask, and without alternatives
    processed: Places  # all other rows
    places: tuple[Tensor, Tensor] | None  # both, on the device; None: one of them is empty
    masked: Places  # rows that have a mask
    masked_plain: Masked | None  # `places` are indexes into `plain`
    seeds: npt.NDArray[np.uint64]  # [processed]
    unprocessed: Some | None  # rows with logprobs of the model's own distribution; of `processed` as a whole
    unprocessed_asking: tuple[Asking, ...]  # rows are indexes into `unprocessed`
    chunks: tuple[Chunk, ...]
    reads_history: bool  # whether some row needs the tokens before its own


def of_composition(composition: Composition, chunk_rows: int, put: Put) -> Parameters:
    """chunk_rows: the most rows that are processed together."""
    records = composition.records
    is_counted, is_repeating = _is_counted(records), records["repetition_penalty"] != 1
    is_processed = records["do_sample"] | records["watermark"] | is_counted | (records["top_n"] > 0)
    is_processed |= records["masked"] & records["model_logprobs"]
    is_processed |= (records["temperature"] != 1) | is_repeating
    is_processed[composition.biases.places] = True
    is_processed[composition.stops.places] = True
    plain, processed = np.flatnonzero(~is_processed), np.flatnonzero(is_processed)
    mine = records[is_processed]

    masked = np.flatnonzero(records["masked"])

    def masked_among(rows: Places) -> Masked | None:
        places = np.flatnonzero(records["masked"][rows])
        if not len(places):
            return None
        indices = None if len(places) == len(masked) else put(np.searchsorted(masked, rows[places]))
        return Masked(put(places), indices)

    def among_processed(entries: Entries) -> Entries:
        return Entries(np.searchsorted(processed, entries.places), entries.ids, entries.values)

    biases, stops = among_processed(composition.biases), among_processed(composition.stops)
    unprocessed = _some(mine["model_logprobs"], slice(0, len(mine)), put)
    top_n = mine["top_n"][mine["model_logprobs"]]
    return Parameters(
        composition=composition,
        plain=plain,
        processed=processed,
        places=(put(plain), put(processed)) if len(plain) and len(processed) else None,
        masked=masked,
        masked_plain=masked_among(plain),
        seeds=mine["seed"],
        unprocessed=unprocessed,
        unprocessed_asking=tuple(asking(top_n, chunk_rows, put)),
        chunks=tuple(
            _chunk(mine[rows], rows, biases.within(rows), stops.within(rows), masked_among(processed[rows]), put)
            for rows in slices(len(processed), chunk_rows)
        ),
        reads_history=bool((records["mask_reads_history"] | records["watermark"] | is_counted | is_repeating).any()),
    )


def asking(top_n: Places, chunk_rows: int, put: Put) -> Iterator[Asking]:
    """The rows that want alternatives, of top_n [rows], by chunks of as many."""
    rows = np.flatnonzero(top_n)
    return (Asking(rows[part], top_n[rows[part]], put(rows[part])) for part in slices(len(rows), chunk_rows))


def slices(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    """All rows, by chunks."""
    return (slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows))


def _is_counted(records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (records["frequency_penalty"] != 0) | (records["presence_penalty"] != 0)
    return found


def _some(needs_it: npt.NDArray[np.bool_], rows: slice, put: Put) -> Some | None:
    """needs_it [rows of the slice]"""
    places = np.flatnonzero(needs_it)
    return Some(rows.start + places, put(places)) if len(places) else None


def _chunk(
    records: npt.NDArray[np.void],
    rows: slice,
    biases: Entries,
    stops: Entries,
    masked: Masked | None,
    put: Put,
) -> Chunk:
    is_cut = (records["top_k"] > 0) | (records["top_p"] < 1) | (records["typical_p"] < 1) | (records["min_p"] > 0)
    is_cut &= records["do_sample"]
    is_counted, is_repeating = _is_counted(records), records["repetition_penalty"] != 1
    is_topped = (records["top_n"] > 0) & ~records["model_logprobs"]
    topped = np.flatnonzero(is_topped)
    drawn = records[records["do_sample"]]

    def column(name: str, places: npt.NDArray[np.bool_] | slice = slice(None)) -> Tensor:
        return put(records[name][places].copy())  # torch refuses the strides of a record's column

    return Chunk(
        rows=rows,
        watermarked=_some(records["watermark"], rows, put),
        repeating=_some(is_repeating, rows, put),
        counted=_some(is_counted, rows, put),
        masked=masked,
        drawn=_some(records["do_sample"], rows, put),
        topped=Asking(rows.start + topped, records["top_n"][topped], put(topped)) if len(topped) else None,
        biases=(put(biases.places), put(biases.ids), put(biases.values)) if len(biases.places) else None,
        stops=stops,
        temperature=column("temperature")[:, None] if (records["temperature"] != 1).any() else None,
        repetition_penalty=column("repetition_penalty", is_repeating) if is_repeating.any() else None,
        counting_penalties=(column("frequency_penalty", is_counted), column("presence_penalty", is_counted))
        if is_counted.any()
        else None,
        truncation=_truncation(drawn, put) if is_cut.any() else None,
        drawn_is_truncated=put(is_cut[records["do_sample"]]) if is_cut.any() else None,
        topped_is_truncated=put(is_cut[topped]) if is_cut.any() and len(topped) else None,
    )


def _truncation(records: npt.NDArray[np.void], put: Put) -> Truncation:
    neutral = {"top_k": 0, "top_p": 1, "typical_p": 1, "min_p": 0}
    asked = frozenset(name for name, value in neutral.items() if (records[name] != value).any())
    top_k, top_p, typical_p, min_p = (put(records[name].copy()) for name in neutral)
    return Truncation(top_k, top_p, typical_p, min_p, asked)
