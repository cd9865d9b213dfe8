"""Logits to tokens, for a whole batch at once: repetition penalty, temperature, top-k, top-p, min-p, then the choice.

A row's token and logprob depend on its own logits, history, parameters, seed and position only, bit for bit: every
reduction used here works on one row at a time (softmax, max, and sorts of unique integer keys), never across a split
that moves with the number of rows. Rows with NaN or infinite logits come back as BROKEN; the others do not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine.nucleus import BLOCK, Truncation, choose_truncated, choose_whole
from penstock_server.engine.random import uniform

BROKEN = -1  # in the place of a token id

# Rows in work at a time: two float32 copies of so many rows are all that sampling ever allocates.
# PERF: 8 to 32 rows of 49,152 are equally fast, 1 or 2 rows 15 % slower (EPYC, AVX-512, one thread).
_CHUNK_ROWS = {"cpu": 16, "cuda": 128}


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What is asked of each row of the logits; host arrays [samples]."""

    parameters: npt.NDArray[np.void]  # records of SAMPLING_FIELDS
    positions: npt.NDArray[np.int64]  # of the token to be sampled in its sequence
    # Places → [places, longest] int64: their tokens known, padded with one of their own. Asked for by chunks.
    history: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen ids (BROKEN where the logits were) and logprobs, on the device [samples]."""

    ids: Tensor  # int64
    logprobs: Tensor  # float64


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of one composition of the batch; tensors are on the device, places ascend."""

    records: npt.NDArray[np.void]
    whole: npt.NDArray[np.int64]  # places that draw from the whole distribution
    truncated: npt.NDArray[np.int64]  # places that draw from a truncated one
    unprocessed: npt.NDArray[np.int64]  # places whose logprob is the model's, though their logits are processed
    penalized: npt.NDArray[np.int64]  # places with a repetition penalty
    temperature: Tensor | None  # [samples, 1]; None: 1 everywhere
    repetition_penalty: Tensor  # [samples]
    truncation: Truncation  # [samples]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What all chunks of one batch share: draws come in, ids and logprobs go out."""

    parameters: _Parameters
    draws: Tensor  # [samples] float64
    ids: Tensor  # [samples] int64
    logprobs: Tensor  # [samples] float64


class Sampler:
    """Samples one token for each row of the logits; keeps its buffers and the last batch's parameters."""

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        width = -(-vocab_size // BLOCK) * BLOCK
        rows = min(_CHUNK_ROWS[device.type], max_rows)
        # The columns beyond the vocabulary stay at -inf: probability 0.
        self._scores = torch.full((rows, width), float("-inf"), dtype=torch.float32, device=device)
        self._probs = torch.zeros((rows, width), dtype=torch.float32, device=device)
        self._parameters: _Parameters | None = None

    def sample(self, logits: Tensor, request: SampleRequest) -> Sampled:
        """`logits` [samples, vocab] in any float type; they are not changed."""
        num_rows = logits.shape[0]
        batch = _Batch(
            self._of_batch(request.parameters),
            self._tensor(uniform(request.parameters["seed"], request.positions)),
            torch.empty(num_rows, dtype=torch.int64, device=self._device),
            torch.empty(num_rows, dtype=torch.float64, device=self._device),
        )
        step = self._scores.shape[0]
        for start in range(0, num_rows, step):
            self._sample_chunk(logits, request, batch, slice(start, min(start + step, num_rows)))
        return Sampled(batch.ids, batch.logprobs)

    def _of_batch(self, records: npt.NDArray[np.void]) -> _Parameters:
        last = self._parameters
        if last is not None and np.array_equal(last.records, records):
            return last
        temperature, penalty, random = records["temperature"], records["repetition_penalty"], records["do_sample"]
        cut = (records["top_k"] > 0) | (records["top_p"] < 1) | (records["min_p"] > 0)
        processed = random | (temperature != 1) | (penalty != 1)
        self._parameters = _Parameters(
            records=records.copy(),
            whole=np.flatnonzero(random & ~cut),
            truncated=np.flatnonzero(random & cut),
            unprocessed=np.flatnonzero(records["model_logprobs"] & processed),
            penalized=np.flatnonzero(penalty != 1),
            temperature=self._tensor(temperature)[:, None] if (temperature != 1).any() else None,
            repetition_penalty=self._tensor(penalty),
            truncation=Truncation(*(self._tensor(records[name]) for name in ("top_k", "top_p", "min_p"))),
        )
        return self._parameters

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        # A copy: columns of records have strides that torch refuses.
        return torch.from_numpy(np.array(values, order="C")).to(self._device)

    def _places(self, ascending: npt.NDArray[np.int64], rows: slice) -> Tensor | None:
        """Those of some ascending places that lie in a range of rows, counted from its start."""
        inside = ascending[_within(ascending, rows)]
        return self._tensor(inside - rows.start) if len(inside) else None

    def _sample_chunk(self, logits: Tensor, request: SampleRequest, batch: _Batch, rows: slice) -> None:
        parameters, ids = batch.parameters, batch.ids[rows]
        scores, probs = self._scores[: len(ids)], self._probs[: len(ids)]
        words = scores[:, : self._vocab_size]
        words.copy_(logits[rows])
        if (places := self._places(parameters.penalized, rows)) is not None:
            seen = self._tensor(request.history(parameters.penalized[_within(parameters.penalized, rows)]))
            _penalize(words, places, seen, parameters.repetition_penalty[rows])
        if parameters.temperature is not None:
            # From the maximum, so that a small temperature cannot overflow.
            words.sub_(words.amax(-1, keepdim=True)).div_(parameters.temperature[rows])
        torch.softmax(scores, -1, out=probs)
        ids.copy_(_argmax(scores))
        chosen = probs.gather(1, ids[:, None]).squeeze(1).double()
        broken = ~(chosen > 0)  # NaN is not above 0
        draws = batch.draws[rows]
        if (places := self._places(parameters.whole, rows)) is not None:
            ids[places], chosen[places] = choose_whole(probs[places], draws[places])
        if (places := self._places(parameters.truncated, rows)) is not None:
            cut = parameters.truncation.of(rows, places)
            ids[places], chosen[places] = choose_truncated(probs[places], cut, draws[places])
        logprobs = torch.log(chosen, out=batch.logprobs[rows])
        if (places := self._places(parameters.unprocessed, rows)) is not None:
            words.copy_(logits[rows])
            torch.log_softmax(scores, -1, out=probs)
            logprobs[places] = probs[places, ids[places]].double()
        ids.masked_fill_(broken, BROKEN)


def _within(ascending: npt.NDArray[np.int64], rows: slice) -> slice:
    """Which part of ascending places lies in a range of rows."""
    start, stop = np.searchsorted(ascending, (rows.start, rows.stop))
    return slice(int(start), int(stop))


def _penalize(scores: Tensor, places: Tensor, seen: Tensor, penalty: Tensor) -> None:
    """Repetition penalty (Keskar et al. 2019, "CTRL") on every token seen, however often it was seen."""
    rows, factor = places[:, None], penalty[places][:, None]
    before = scores[rows, seen]
    scores[rows, seen] = torch.where(before < 0, before * factor, before / factor)


def _argmax(scores: Tensor) -> Tensor:
    """[rows]: where each row is greatest, the lowest id of several.

    PERF: torch's argmax is not vectorized; a maximum by blocks and a search in one block is 8 times as fast
    (0.16 against 1.3 ms for 32 × 49,152 float32, EPYC, one thread).
    """
    blocks = scores.view(scores.shape[0], -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(best), device=best.device), best].argmax(-1)
    return best * BLOCK + inside
