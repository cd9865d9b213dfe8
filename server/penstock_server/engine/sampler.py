"""Logits to tokens, for a whole batch at once: repetition penalty, temperature, top-k, top-p, min-p, then the choice.

A row's token and logprob depend on its own logits, history, parameters, seed and position only, bit for bit: every
reduction used here works on one row at a time (softmax, max, and sorts of unique integer keys), never across a split
that moves with the number of rows. Rows with NaN or infinite logits come back as BROKEN; the others do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine.greedy import BLOCK, PARALLEL_ROWS, greatest, native_greedy
from penstock_server.engine.head import Truncation
from penstock_server.engine.nucleus import choose_truncated, choose_whole
from penstock_server.engine.random import uniform

BROKEN = -1  # in the place of a token id

# Rows in work at a time: two float32 copies of so many rows are all that sampling ever allocates.
# PERF: 8 to 32 rows of 49,152 are equally fast, 1 or 2 rows 15 % slower (EPYC, AVX-512, one thread).
_CHUNK_ROWS = {"cpu": 16, "cuda": 128}

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What is asked of each row of the logits; host arrays [samples]."""

    # Records of SAMPLING_FIELDS. The very same array again says that the batch's composition has not changed.
    parameters: npt.NDArray[np.void]
    positions: npt.NDArray[np.int64]  # of the token to be sampled in its sequence
    # Places → [places, longest] int64: their tokens known, padded with one of their own. Asked for by chunks.
    history: Callable[[Places], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen ids (BROKEN where the logits were) and logprobs, on the device [samples]."""

    ids: Tensor  # int64
    logprobs: Tensor  # float32 or float64


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of one composition of the batch. Tensors are on the device; places count from row 0 of the logits
    in `plain` and `processed`, and among the processed rows in everything after them. All ascend."""

    records: npt.NDArray[np.void]  # as they came: to be recognized when they come again
    plain: Places  # greedy, logits as they are
    processed: Places  # all others
    whole: Places  # draw from the whole distribution
    truncated: Places  # draw from a truncated one
    unprocessed: Places  # their logprob is the model's own
    penalized: Places  # with a repetition penalty
    temperature: Tensor | None  # [processed, 1]; None: 1 everywhere
    repetition_penalty: Tensor  # [processed]
    truncation: Truncation  # [processed]


class Sampler:
    """Samples one token for each row of the logits; keeps its buffers and the last batch's parameters."""

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._native_greedy = native_greedy(device)
        width = -(-vocab_size // BLOCK) * BLOCK
        rows = min(_CHUNK_ROWS[device.type], max_rows)
        # The columns beyond the vocabulary stay at -inf: probability 0.
        self._scores = torch.full((rows, width), float("-inf"), dtype=torch.float32, device=device)
        self._probs = torch.zeros((rows, width), dtype=torch.float32, device=device)
        self._parameters: _Parameters | None = None

    def sample(self, logits: Tensor, request: SampleRequest) -> Sampled:
        """`logits` [samples, vocab] in any float type; they are not changed."""
        parameters = self._of_batch(request.parameters)
        if not len(parameters.processed):
            return self._choose_plain(logits)
        if not len(parameters.plain):
            return self._choose_processed(logits, request, parameters)
        out = self._empty(len(logits))
        plain, processed = self._tensor(parameters.plain), self._tensor(parameters.processed)
        for places, sampled in (
            (plain, self._choose_plain(logits[plain])),
            (processed, self._choose_processed(logits[processed], request, parameters)),
        ):
            out.ids[places] = sampled.ids
            out.logprobs[places] = sampled.logprobs.double()
        return out

    def _of_batch(self, records: npt.NDArray[np.void]) -> _Parameters:
        last = self._parameters
        if last is not None and last.records is records:
            return last
        is_processed = records["do_sample"] | (records["temperature"] != 1) | (records["repetition_penalty"] != 1)
        mine = records[is_processed]
        cut = (mine["top_k"] > 0) | (mine["top_p"] < 1) | (mine["min_p"] > 0)
        self._parameters = _Parameters(
            records=records,
            plain=np.flatnonzero(~is_processed),
            processed=np.flatnonzero(is_processed),
            whole=np.flatnonzero(mine["do_sample"] & ~cut),
            truncated=np.flatnonzero(mine["do_sample"] & cut),
            unprocessed=np.flatnonzero(mine["model_logprobs"]),
            penalized=np.flatnonzero(mine["repetition_penalty"] != 1),
            temperature=self._tensor(mine["temperature"])[:, None] if (mine["temperature"] != 1).any() else None,
            repetition_penalty=self._tensor(mine["repetition_penalty"]),
            truncation=Truncation(*(self._tensor(mine[name]) for name in ("top_k", "top_p", "min_p"))),
        )
        return self._parameters

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        # A copy: columns of records have strides that torch refuses.
        return torch.from_numpy(np.array(values, order="C")).to(self._device)

    def _places(self, ascending: Places, rows: slice) -> Tensor | None:
        """Those of some ascending places that lie in a range of rows, counted from its start."""
        inside = _within(ascending, rows)
        return self._tensor(inside - rows.start) if len(inside) else None

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        step = len(self._scores)
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def _choose_plain(self, logits: Tensor) -> Sampled:
        """The model's own favourite of each row."""
        if self._native_greedy is not None and logits.dtype == torch.bfloat16:
            ids, logprobs = self._native_greedy(logits.contiguous())
            finite = np.isfinite(logprobs.numpy())
            if not finite.all():
                ids[torch.from_numpy(~finite)] = BROKEN
            return Sampled(ids, logprobs)
        out = self._empty(len(logits))
        for rows in self._chunks(len(logits)):
            scores, probs = self._buffers(logits, rows)
            torch.softmax(scores, -1, out=probs)
            _take_greatest(scores, probs, out.ids[rows], out.logprobs[rows])
        return Sampled(out.ids.masked_fill_(~(out.logprobs > 0), BROKEN), out.logprobs.log_())

    def _choose_processed(self, logits: Tensor, request: SampleRequest, parameters: _Parameters) -> Sampled:
        """Every row through the processors; `logits` holds the processed places only."""
        with self._threads(len(logits)):
            return self._choose_processed_chunks(logits, request, parameters)

    def _choose_processed_chunks(self, logits: Tensor, request: SampleRequest, parameters: _Parameters) -> Sampled:
        mine = parameters.processed
        draws = self._tensor(uniform(request.parameters["seed"][mine], request.positions[mine]))
        out = self._empty(len(logits))
        for rows in self._chunks(len(logits)):
            scores, probs = self._buffers(logits, rows)
            self._process(scores[:, : self._vocab_size], request, parameters, rows)
            torch.softmax(scores, -1, out=probs)
            ids, chosen = out.ids[rows], out.logprobs[rows]
            _take_greatest(scores, probs, ids, chosen)
            broken = ~(chosen > 0)  # NaN is not above 0
            if (places := self._places(parameters.whole, rows)) is not None:
                ids[places], chosen[places] = choose_whole(_at(probs, places), draws[rows][places])
            if (places := self._places(parameters.truncated, rows)) is not None:
                cut = parameters.truncation.at(rows).at(places)
                ids[places], chosen[places] = choose_truncated(_at(probs, places), cut, draws[rows][places])
            chosen.log_()
            if (places := self._places(parameters.unprocessed, rows)) is not None:
                scores, probs = self._buffers(logits, rows)
                torch.log_softmax(scores, -1, out=probs)
                chosen[places] = probs[places, ids[places]].double()
            ids.masked_fill_(broken, BROKEN)
        return out

    @contextmanager
    def _threads(self, num_rows: int) -> Iterator[None]:
        """One thread for few rows: some ten small operators, each of which would wait for all threads at its end."""
        threads = torch.get_num_threads()
        if self._device.type != "cpu" or num_rows >= PARALLEL_ROWS or threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _process(self, words: Tensor, request: SampleRequest, parameters: _Parameters, rows: slice) -> None:
        """Penalties, then temperature, on scores [rows, vocab], in place."""
        if (places := self._places(parameters.penalized, rows)) is not None:
            seen = self._tensor(request.history(parameters.processed[_within(parameters.penalized, rows)]))
            _penalize(words, places, seen, parameters.repetition_penalty[rows])
        if parameters.temperature is not None:
            # From the maximum, so that a small temperature cannot overflow.
            words.sub_(words.amax(-1, keepdim=True)).div_(parameters.temperature[rows])

    def _buffers(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Some rows' logits as float32 scores, and room for their probabilities; both [rows, padded vocab]."""
        num_rows = rows.stop - rows.start
        scores = self._scores[:num_rows]
        scores[:, : self._vocab_size].copy_(logits[rows])
        return scores, self._probs[:num_rows]

    def _empty(self, num_rows: int) -> Sampled:
        return Sampled(
            torch.empty(num_rows, dtype=torch.int64, device=self._device),
            torch.empty(num_rows, dtype=torch.float64, device=self._device),
        )


def _within(ascending: Places, rows: slice) -> Places:
    """Those of some ascending places that lie in a range of rows."""
    start, stop = np.searchsorted(ascending, (rows.start, rows.stop))
    return ascending[start:stop]


def _at(probs: Tensor, places: Tensor) -> Tensor:
    """Some rows, ascending; without a copy when they are all."""
    return probs if len(places) == len(probs) else probs[places]


def _take_greatest(scores: Tensor, probs: Tensor, ids: Tensor, chosen: Tensor) -> None:
    """The greatest of each row into `ids`, its probability into `chosen`."""
    ids.copy_(greatest(scores))
    chosen.copy_(probs.gather(1, ids[:, None]).squeeze(1))


def _penalize(scores: Tensor, places: Tensor, seen: Tensor, penalty: Tensor) -> None:
    """Repetition penalty (Keskar et al. 2019, "CTRL") on every token seen, however often it was seen."""
    rows, factor = places[:, None], penalty[places][:, None]
    before = scores[rows, seen]
    scores[rows, seen] = torch.where(before < 0, before * factor, before / factor)
