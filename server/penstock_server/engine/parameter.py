"""The sampling parameters of a batch, grouped by the processors that rows need. Computed once per composition of the
batch, and used for many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock_server.engine.sampling import Composition, Entries
from penstock_server.engine.truncation import Truncation

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Which rows need what. `plain` and `processed` are rows of the logits; all other places are indexes into
    `processed`. Places ascend. Tensors are on the device."""

    composition: Composition  # the object that these parameters were computed from
    plain: Places  # rows that are greedy, without processors except a grammar, and without alternatives
    processed: Places  # all other rows
    seeds: npt.NDArray[np.uint64]  # [processed]
    watermarked: Places
    repeating: Places  # with a repetition penalty
    counted: Places  # with a frequency or presence penalty
    constrained: Places  # by a grammar
    constrained_plain: Places  # by a grammar; indexes into `plain`
    drawn: Places  # sampled by a random number
    truncated: Places  # sampled from a part of the distribution
    topped: Places  # with alternatives of the processed distribution
    unprocessed: Places  # with logprobs of the model's own distribution
    top_n: npt.NDArray[np.int64]  # [processed]
    biases: Entries
    stops: Entries
    temperature: Tensor | None  # [processed, 1]; None: 1 everywhere
    repetition_penalty: Tensor  # [processed]
    frequency_penalty: Tensor  # [processed]
    presence_penalty: Tensor  # [processed]
    is_truncated: Tensor  # [processed]
    truncation: Truncation  # [processed]


def of_composition(composition: Composition, tensor: Callable[[npt.NDArray[Any]], Tensor]) -> Parameters:
    """`tensor` copies an array to the device."""
    records = composition.records
    is_counted = (records["frequency_penalty"] != 0) | (records["presence_penalty"] != 0)
    is_processed = records["do_sample"] | records["watermark"] | is_counted | (records["top_n"] > 0)
    is_processed |= records["constrained"] & records["model_logprobs"]
    is_processed |= (records["temperature"] != 1) | (records["repetition_penalty"] != 1)
    is_processed[composition.biases.places] = True
    is_processed[composition.stops.places] = True
    processed = np.flatnonzero(is_processed)
    mine = records[is_processed]

    def among_processed(entries: Entries) -> Entries:
        return Entries(np.searchsorted(processed, entries.places), entries.ids, entries.values)

    is_cut = (mine["top_k"] > 0) | (mine["top_p"] < 1) | (mine["typical_p"] < 1) | (mine["min_p"] > 0)
    is_cut &= mine["do_sample"]
    return Parameters(
        composition=composition,
        plain=np.flatnonzero(~is_processed),
        processed=processed,
        seeds=mine["seed"],
        watermarked=np.flatnonzero(mine["watermark"]),
        repeating=np.flatnonzero(mine["repetition_penalty"] != 1),
        counted=np.flatnonzero(is_counted[is_processed]),
        constrained=np.flatnonzero(mine["constrained"]),
        constrained_plain=np.flatnonzero(records["constrained"][~is_processed]),
        drawn=np.flatnonzero(mine["do_sample"]),
        truncated=np.flatnonzero(is_cut),
        topped=np.flatnonzero((mine["top_n"] > 0) & ~mine["model_logprobs"]),
        unprocessed=np.flatnonzero(mine["model_logprobs"]),
        top_n=mine["top_n"].copy(),
        biases=among_processed(composition.biases),
        stops=among_processed(composition.stops),
        temperature=tensor(mine["temperature"])[:, None] if (mine["temperature"] != 1).any() else None,
        repetition_penalty=tensor(mine["repetition_penalty"]),
        frequency_penalty=tensor(mine["frequency_penalty"]),
        presence_penalty=tensor(mine["presence_penalty"]),
        is_truncated=tensor(is_cut),
        truncation=_truncation(mine, tensor),
    )


def _truncation(records: npt.NDArray[np.void], tensor: Callable[[npt.NDArray[Any]], Tensor]) -> Truncation:
    neutral = {"top_k": 0, "top_p": 1, "typical_p": 1, "min_p": 0}
    asked = frozenset(name for name, value in neutral.items() if (records[name][records["do_sample"]] != value).any())
    top_k, top_p, typical_p, min_p = (tensor(records[name]) for name in neutral)
    return Truncation(top_k, top_p, typical_p, min_p, asked)


def within(ascending: Places, rows: slice) -> Places:
    """The places within a range of rows."""
    start, stop = np.searchsorted(ascending, (rows.start, rows.stop))
    return ascending[start:stop]
