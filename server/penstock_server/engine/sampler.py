"""Logits to tokens for a whole batch: the processors in the order of proto/worker.proto, then the choice.

A row's token and logprobs depend only on its own logits, history, parameters, seed and position, bit for bit: every
reduction here works on one row at a time or on integers, never across a split that depends on the number of rows. Rows
with NaN or infinite logits return BROKEN and do not affect other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine import penalty
from penstock_server.engine.choice import choose
from penstock_server.engine.constraint import Constrainer, Constraints, Masks
from penstock_server.engine.cut import Room
from penstock_server.engine.device import on_device
from penstock_server.engine.greedy import BLOCK, PARALLEL_ROWS, Greedy, fused_greedy, greatest
from penstock_server.engine.logprob import Alternatives, Level, alternatives_of, level_of, logprobs_at
from penstock_server.engine.parameter import Parameters, Places, of_composition, within
from penstock_server.engine.random import uniform
from penstock_server.engine.sampling import Composition
from penstock_server.engine.truncation import truncate
from penstock_server.engine.watermark import Watermark

BROKEN = -1  # instead of a token id; also what the native kernel returns

# Rows that are processed at a time. Only the buffers for these rows, 8 numbers per logit, are allocated permanently.
# PERF: 8 to 32 rows of 49,152 are equally fast, 1 or 2 rows 15 % slower (EPYC, AVX-512, one thread).
_CHUNK_ROWS = {"cpu": 16, "cuda": 128}


class History(Protocol):
    """The tokens of the batch's rows, read only for rows that need them."""

    def positions(self, places: Places) -> npt.NDArray[np.int64]:
        """[places]: position of the token to be sampled."""
        ...

    def num_generated(self, places: Places) -> npt.NDArray[np.int64]:
        """[places]: tokens generated before it."""
        ...

    def previous_ids(self, places: Places) -> npt.NDArray[np.int64]:
        """[places]: the token before it."""
        ...

    def known(self, places: Places) -> npt.NDArray[np.int64]:
        """[places, longest]: all known tokens; shorter rows are padded with a token of their own."""
        ...

    def generated(self, places: Places) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """[places, longest ≥ 1]: the generated tokens, and whether each is real; padding may be any id."""
        ...


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How to sample each row of the logits."""

    composition: Composition
    history: History
    constraints: Constraints | None = None  # masks of all rows whose record is constrained


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen ids (BROKEN where logits are not finite) and their logprobs, on the device [samples]."""

    ids: Tensor  # int64
    logprobs: Tensor  # float32 or float64
    alternatives: list[Alternatives] = field(default_factory=list)  # of the rows that asked for them


class Sampler:
    """Samples one token per row of logits. Keeps its buffers and the last batch's parameters."""

    def __init__(
        self, vocab_size: int, device: torch.device, max_rows: int, watermark: Watermark, cpu_isa: str = ""
    ) -> None:
        """cpu_isa: as of `find_build`."""
        self._vocab_size = vocab_size
        self._device = device
        self._watermark = watermark
        self._cpu_isa = cpu_isa
        self._greedy: dict[torch.dtype, Greedy | None] = {}  # by the dtype of the logits
        width = -(-vocab_size // BLOCK) * BLOCK
        rows = min(_CHUNK_ROWS[device.type], max_rows)
        # Columns beyond the vocabulary stay at -inf: probability 0.
        self._scores = torch.full((rows, width), float("-inf"), dtype=torch.float32, device=device)
        self._probs = torch.zeros((rows, width), dtype=torch.float32, device=device)
        self._room = Room(rows, width, device)
        self._constrainer = Constrainer(device)
        self._parameters: Parameters | None = None

    def sample(self, logits: Tensor, request: SampleRequest) -> Sampled:
        """Sample from logits [samples, vocab] of any float type, which are not changed."""
        parameters = self._of_batch(request.composition)
        masks: Masks | None = None
        if len(parameters.constrained_plain):
            assert request.constraints is not None
            constrained = parameters.plain[parameters.constrained_plain]
            masks = parameters.constrained_plain, request.constraints.of(constrained)
        if not len(parameters.processed):
            return self._choose_plain(logits, masks)
        if not len(parameters.plain):
            return self._choose_processed(logits, request, parameters)
        out = self._empty(len(logits))
        plain, processed = self._tensor(parameters.plain), self._tensor(parameters.processed)
        rest = self._choose_processed(logits[processed], request, parameters)
        for places, sampled in ((plain, self._choose_plain(logits[plain], masks)), (processed, rest)):
            out.ids[places] = sampled.ids
            out.logprobs[places] = sampled.logprobs.double()
        out.alternatives.extend(each.renumbered(parameters.processed[each.rows]) for each in rest.alternatives)
        return out

    def score(self, logits: Tensor, ids: Tensor, top_n: npt.NDArray[np.int64]) -> tuple[Tensor, list[Alternatives]]:
        """Logprobs [rows] of the given ids in the model's own distribution, NaN where logits are not finite, and top_n
        [rows] alternatives."""
        favourite = self._choose_plain(logits)
        level = level_of(logits, favourite.ids.clamp(min=0), favourite.logprobs)
        asking = np.flatnonzero(top_n)
        alternatives = []
        for part in (asking[rows] for rows in self._chunks(len(asking))):
            places = self._tensor(part)
            alternatives.append(alternatives_of(logits[places].float(), part, top_n[part], level.at(places)))
        return logprobs_at(logits, ids, level), alternatives

    def _of_batch(self, composition: Composition) -> Parameters:
        if self._parameters is None or self._parameters.composition is not composition:
            self._parameters = of_composition(composition, self._tensor)
        return self._parameters

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        # Copied, because torch refuses the strides of a record's columns.
        return on_device(np.array(values, order="C"), self._device)

    def _places(self, ascending: Places, rows: slice) -> Tensor | None:
        """The places within a range of rows, relative to its start; None if there are none."""
        inside = within(ascending, rows)
        return self._tensor(inside - rows.start) if len(inside) else None

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        step = len(self._scores)
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def _choose_plain(self, logits: Tensor, masks: Masks | None = None) -> Sampled:
        """The most probable token of each row, among the tokens that its mask allows if it has one."""
        if logits.dtype not in self._greedy:
            self._greedy[logits.dtype] = fused_greedy(self._device, logits.dtype, self._cpu_isa)
        if (choose_greedy := self._greedy[logits.dtype]) is not None:
            return Sampled(*choose_greedy(logits.contiguous(), masks))
        if masks is not None:
            logits = self._constrainer.applied(logits, self._tensor(masks[0]), masks[1])
        out = self._empty(len(logits))
        for rows in self._chunks(len(logits)):
            scores, probs = self._buffers(logits, rows)
            torch.softmax(scores, -1, out=probs)
            _take_greatest(scores, probs, out.ids[rows], out.logprobs[rows])
        return Sampled(out.ids.masked_fill_(~(out.logprobs > 0), BROKEN), out.logprobs.log_())

    def _choose_processed(self, logits: Tensor, request: SampleRequest, parameters: Parameters) -> Sampled:
        """Sample through the processors; `logits` holds only the rows `parameters.processed`."""
        mine = parameters.processed
        with self._threads(len(logits)):
            draws = self._tensor(uniform(parameters.seeds, request.history.positions(mine)))
            out = self._empty(len(logits))
            for rows in self._chunks(len(logits)):
                self._choose_chunk(logits, request, parameters, rows, draws[rows], out)
            if len(parameters.unprocessed):
                places = self._tensor(parameters.unprocessed)
                own = logits if len(places) == len(logits) else logits[places]
                top_n = parameters.top_n[parameters.unprocessed]
                out.logprobs[places], found = self.score(own, out.ids[places].clamp(min=0), top_n)
                out.alternatives.extend(each.renumbered(parameters.unprocessed[each.rows]) for each in found)
        return out

    def _choose_chunk(
        self,
        logits: Tensor,
        request: SampleRequest,
        parameters: Parameters,
        rows: slice,
        draws: Tensor,
        out: Sampled,
    ) -> None:
        scores, probs = self._buffers(logits, rows)
        self._process(scores, probs, request, parameters, rows)
        torch.softmax(scores, -1, out=probs)
        ids, logprobs = out.ids[rows], out.logprobs[rows]
        _take_greatest(scores, probs, ids, logprobs)
        broken = ~(logprobs > 0)  # NaN is not above 0
        if self._device.type != "cpu" or broken.any():  # only a CPU can tell without waiting
            probs.masked_fill_(broken[:, None], 0.0)
            probs[:, 0].masked_fill_(broken, 1.0)
        level = level_of(scores, ids, logprobs.log())
        if (places := self._places(parameters.drawn, rows)) is not None:
            all_mine = len(places) == len(probs)
            mine = probs if all_mine else probs[places]
            truncated = self._places(parameters.truncated, rows)
            if truncated is not None:
                truncate(mine, parameters.truncation.at(rows).at(places), self._room)
                if not all_mine:
                    probs[places] = mine
            ids[places], mass = choose(mine, draws[places])
            if truncated is not None:
                level.logprob[places] -= torch.where(parameters.is_truncated[rows][places], mass.log(), 0.0)
        logprobs.copy_(logprobs_at(scores, ids, level))
        self._take_alternatives(scores, probs, level, parameters, rows, out.alternatives)
        ids.masked_fill_(broken, BROKEN)

    def _take_alternatives(
        self,
        scores: Tensor,
        probs: Tensor,
        level: Level,
        parameters: Parameters,
        rows: slice,
        alternatives: list[Alternatives],
    ) -> None:
        """Add those of the processed distribution, without tokens that truncation removed."""
        if (places := self._places(parameters.topped, rows)) is None:
            return
        mine = scores[places]
        if len(within(parameters.truncated, rows)):
            removed = (probs[places] == 0) & parameters.is_truncated[rows][places][:, None]
            mine.masked_fill_(removed, float("-inf"))
        mine_rows = within(parameters.topped, rows)
        alternatives.append(alternatives_of(mine, mine_rows, parameters.top_n[mine_rows], level.at(places)))

    @contextmanager
    def _threads(self, num_rows: int) -> Iterator[None]:
        """Use one thread for few rows: each of about ten small operators would end with a barrier of all threads."""
        threads = torch.get_num_threads()
        if self._device.type != "cpu" or num_rows >= PARALLEL_ROWS or threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _process(
        self, padded: Tensor, room: Tensor, request: SampleRequest, parameters: Parameters, rows: slice
    ) -> None:
        """Run all processors before truncation, in order, on scores [rows, padded vocab] in place; `room` is scratch
        memory of the same size."""
        scores, mine = padded[:, : self._vocab_size], parameters.processed
        if (places := self._places(parameters.watermarked, rows)) is not None:
            previous = request.history.previous_ids(mine[within(parameters.watermarked, rows)])
            self._watermark.apply(scores, places, previous)
        if (places := self._places(parameters.repeating, rows)) is not None:
            seen = self._tensor(request.history.known(mine[within(parameters.repeating, rows)]))
            penalty.penalize_repetition(scores, places, seen, parameters.repetition_penalty[rows][places])
        if (places := self._places(parameters.counted, rows)) is not None:
            ids, real = request.history.generated(mine[within(parameters.counted, rows)])
            factors = (parameters.frequency_penalty[rows][places], parameters.presence_penalty[rows][places])
            penalty.penalize_counts(scores, room, places, (self._tensor(ids), self._tensor(real)), factors)
        if len((biases := parameters.biases.within(rows)).places):
            entries = (self._tensor(column) for column in (biases.places, biases.ids, biases.values))
            penalty.add_biases(scores, *entries)
        if len((stops := parameters.stops.within(rows)).places):
            early = request.history.num_generated(mine[rows][stops.places]) < stops.values
            penalty.forbid(scores, self._tensor(stops.places[early]), self._tensor(stops.ids[early]))
        if (places := self._places(parameters.constrained, rows)) is not None:
            assert request.constraints is not None
            words = request.constraints.of(mine[within(parameters.constrained, rows)])
            self._constrainer.apply(scores, places, words)
        if parameters.temperature is not None:
            # Relative to the maximum, so that a small temperature cannot overflow.
            scores.sub_(scores.amax(-1, keepdim=True)).div_(parameters.temperature[rows])

    def _buffers(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The logits of some rows as float32 scores, and a buffer for probabilities; both [rows, padded vocab]."""
        num_rows = rows.stop - rows.start
        scores = self._scores[:num_rows]
        scores[:, : self._vocab_size].copy_(logits[rows])
        return scores, self._probs[:num_rows]

    def _empty(self, num_rows: int) -> Sampled:
        return Sampled(
            torch.empty(num_rows, dtype=torch.int64, device=self._device),
            torch.empty(num_rows, dtype=torch.float64, device=self._device),
        )


def _take_greatest(scores: Tensor, probs: Tensor, ids: Tensor, chosen: Tensor) -> None:
    """Write the greatest token of each row to `ids`, and its probability to `chosen`."""
    ids.copy_(greatest(scores))
    chosen.copy_(probs.gather(1, ids[:, None]).squeeze(1))
