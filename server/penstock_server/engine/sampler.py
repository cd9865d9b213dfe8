"""Logits to tokens for a whole batch: the processors in the order of proto/worker.proto, then the choice.

A row's token and logprobs depend only on its own logits, history, parameters, seed and position, bit for bit: every
reduction here works on one row at a time or on integers, never across a split that depends on the number of rows. Rows
with NaN or infinite logits return BROKEN and do not affect other rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine import memory, penalty
from penstock_server.engine.choice import choose
from penstock_server.engine.constraint import Constrainer, Masks
from penstock_server.engine.cut import Room
from penstock_server.engine.greedy import BLOCK, PARALLEL_ROWS, Greedy, fused_greedy, greatest
from penstock_server.engine.logprob import Alternatives, alternatives_of, level_of, logprobs_at
from penstock_server.engine.parameter import Asking, Chunk, Parameters, Places, Some, of_composition, slices
from penstock_server.engine.random import uniform
from penstock_server.engine.sampling import Composition
from penstock_server.engine.transfer import Fetch, Put
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
class Prepared:
    """How a step samples, as far as it does not depend on the tokens of earlier steps. Tensors are on the device."""

    parameters: Parameters
    history: History
    draws: Tensor | None  # [processed] random numbers; None: no row is processed
    early_stops: Sequence[tuple[Tensor, Tensor] | None]  # by chunk: places and ids of stop tokens that are forbidden


@dataclass(frozen=True, slots=True)
class Recent:
    """What a chunk's processors need of the tokens before. Tensors are on the device."""

    green: Tensor | None  # [watermarked, vocab] uint8
    seen: Tensor | None  # [repeating, longest] all known tokens
    generated: tuple[Tensor, Tensor] | None  # [counted, longest] tokens, and whether each is real


@dataclass(frozen=True, slots=True)
class Context:
    """What sampling needs of the tokens of earlier steps. Tensors are on the device."""

    words: Tensor | None  # [masked, words] the masks of all rows that have one; None: there are none
    chunks: Sequence[Recent]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen ids (BROKEN where logits are not finite) and their logprobs, on the device [samples]."""

    ids: Tensor  # int64
    logprobs: Tensor  # float32 or float64
    alternatives: list[Alternatives] = field(default_factory=list)  # for the rows whose requests asked for them


@dataclass
class SampledTime:
    """What sampling would have taken in addition if every chunk had been processed, estimated from the first."""

    skipped_s: float = 0.0


class Sampler:
    """Samples one token per row of logits: `prepare` before the model runs, `read_context` when the tokens of earlier
    steps are known, then `sample`. Keeps its buffers and the last batch's parameters."""

    def __init__(
        self, vocab_size: int, device: torch.device, max_rows: int, watermark: Watermark, cpu_isa: str = ""
    ) -> None:
        """cpu_isa: as of `find_build`."""
        self.device = device
        self._vocab_size = vocab_size
        self._watermark = watermark
        self._cpu_isa = cpu_isa
        self._greedy: dict[torch.dtype, Greedy | None] = {}  # by the dtype of the logits
        width = -(-vocab_size // BLOCK) * BLOCK
        rows = min(_CHUNK_ROWS[device.type], max_rows)
        # Columns beyond the vocabulary stay at -inf: probability 0.
        self._scores = torch.full((rows, width), -math.inf, dtype=torch.float32, device=device)
        self._probs = torch.zeros((rows, width), dtype=torch.float32, device=device)
        self._room = Room(rows, width, device)
        self._constrainer = Constrainer(device)
        self._parameters: Parameters | None = None
        self._sampled_time: SampledTime | None = None

    @contextmanager
    def first_chunks_only(self) -> Iterator[SampledTime]:
        """In the body, process only the first chunk of each batch; the other rows that are processed get token 0.

        For measurements on a CPU. A batch needs as much memory as before if its first rows have the longest histories,
        because a chunk's memory is free before the next chunk.
        """
        self._sampled_time = SampledTime()
        try:
            yield self._sampled_time
        finally:
            self._sampled_time = None

    @property
    def chunk_rows(self) -> int:
        """The most rows that are processed together."""
        return len(self._scores)

    def release(self) -> None:
        """Give back the memory that only sampling with parameters needs. The next use takes it again."""
        memory.release_pages([self._scores, self._probs, *self._room.buffers, self._watermark.forget()])
        self._scores[:, self._vocab_size :] = -math.inf

    def prepare(self, composition: Composition, history: History, put: Put) -> Prepared:
        """Reads lengths of the history, but no tokens."""
        if self._parameters is None or self._parameters.composition is not composition:
            self._parameters = of_composition(composition, self.chunk_rows, put)
        parameters = self._parameters
        draws = None
        if len(parameters.processed):
            draws = put(uniform(parameters.seeds, history.positions(parameters.processed)))

        def early_stops(chunk: Chunk) -> tuple[Tensor, Tensor] | None:
            stops = chunk.stops
            if not len(stops.places):
                return None
            rows = parameters.processed[chunk.rows][stops.places]
            is_early = history.num_generated(rows) < stops.values
            return (put(stops.places[is_early]), put(stops.ids[is_early])) if is_early.any() else None

        return Prepared(parameters, history, draws, [early_stops(chunk) for chunk in parameters.chunks])

    def read_context(self, prepared: Prepared, words: Tensor | None, put: Put) -> Context:
        """words: as of `Context`; their contents may arrive later."""
        parameters, history = prepared.parameters, prepared.history

        def recent(chunk: Chunk) -> Recent:
            def rows(some: Some) -> Places:
                return parameters.processed[some.processed]

            green = seen = generated = None
            if chunk.watermarked is not None:
                green = put(self._watermark.green(history.previous_ids(rows(chunk.watermarked))))
            if chunk.repeating is not None:
                seen = put(history.known(rows(chunk.repeating)))
            if chunk.counted is not None:
                ids, is_real = history.generated(rows(chunk.counted))
                generated = put(ids), put(is_real)
            return Recent(green, seen, generated)

        return Context(words, [recent(chunk) for chunk in parameters.chunks])

    def sample(self, logits: Tensor, prepared: Prepared, context: Context, fetch: Fetch) -> Sampled:
        """Sample from logits [samples, vocab] of any float type, which are not changed. Alternatives are fetched to the
        host."""
        parameters, masks = prepared.parameters, None
        if context.words is not None and parameters.masked_plain is not None:
            masks = parameters.masked_plain.masks(context.words)
        if not len(parameters.processed):
            return self._choose_plain(logits, masks)
        if parameters.places is None:
            return self._choose_processed(logits, prepared, context, fetch)
        out = self._empty(len(logits))
        plain, processed = parameters.places
        rest = self._choose_processed(logits[processed], prepared, context, fetch)
        for places, sampled in ((plain, self._choose_plain(logits[plain], masks)), (processed, rest)):
            out.ids[places] = sampled.ids
            out.logprobs[places] = sampled.logprobs.double()
        out.alternatives.extend(each.renumbered(parameters.processed[each.rows]) for each in rest.alternatives)
        return out

    def score(
        self, logits: Tensor, ids: Tensor, asking: Sequence[Asking], fetch: Fetch
    ) -> tuple[Tensor, list[Alternatives]]:
        """Logprobs [rows] of the given ids in the model's own distribution, NaN where logits are not finite, and the
        alternatives that some rows ask for."""
        favourite = self._choose_plain(logits)
        level = level_of(logits, favourite.ids.clamp(min=0), favourite.logprobs)
        alternatives = [
            alternatives_of(logits[part.places].float(), part, level.at(part.places), fetch) for part in asking
        ]
        return logprobs_at(logits, ids, level), alternatives

    def _choose_plain(self, logits: Tensor, masks: Masks | None = None) -> Sampled:
        """The most probable token of each row, among the tokens that its mask allows if it has one."""
        if logits.dtype not in self._greedy:
            self._greedy[logits.dtype] = fused_greedy(self.device, logits.dtype, self._cpu_isa)
        if (choose_greedy := self._greedy[logits.dtype]) is not None:
            return Sampled(*choose_greedy(logits.contiguous(), masks))
        if masks is not None:
            logits = self._constrainer.applied(logits, *masks)
        out = self._empty(len(logits))
        for rows in slices(len(logits), self.chunk_rows):
            scores, probs = self._buffers(logits, rows)
            torch.softmax(scores, -1, out=probs)
            _take_greatest(scores, probs, out.ids[rows], out.logprobs[rows])
        return Sampled(out.ids.masked_fill_(~(out.logprobs > 0), BROKEN), out.logprobs.log_())

    def _choose_processed(self, logits: Tensor, prepared: Prepared, context: Context, fetch: Fetch) -> Sampled:
        """Sample through the processors; `logits` holds only the rows `parameters.processed`."""
        parameters, draws = prepared.parameters, prepared.draws
        assert draws is not None
        with self._threads(len(logits)):
            out = self._empty(len(logits))
            chunks = list(zip(parameters.chunks, context.chunks, prepared.early_stops, strict=True))
            num_chunks = len(chunks) if self._sampled_time is None else 1
            started = time.perf_counter()
            for chunk, recent, stops in chunks[:num_chunks]:
                scores, probs = self._buffers(logits, chunk.rows)
                self._process(scores, probs, chunk, recent, stops, context.words)
                self._choose_chunk(scores, probs, chunk, draws[chunk.rows], out, fetch)
            if self._sampled_time is not None:
                self._sampled_time.skipped_s += (time.perf_counter() - started) * (len(chunks) - num_chunks)
            if (some := parameters.unprocessed) is not None:
                places = some.places
                own = logits if len(places) == len(logits) else logits[places]
                ids, asking = out.ids[places].clamp(min=0), parameters.unprocessed_asking
                out.logprobs[places], found = self.score(own, ids, asking, fetch)
                out.alternatives.extend(each.renumbered(some.processed[each.rows]) for each in found)
        return out

    def _choose_chunk(
        self, scores: Tensor, probs: Tensor, chunk: Chunk, draws: Tensor, out: Sampled, fetch: Fetch
    ) -> None:
        """Choose by processed scores [rows, padded vocab]; `probs` is scratch memory of the same size."""
        torch.softmax(scores, -1, out=probs)
        ids, logprobs = out.ids[chunk.rows], out.logprobs[chunk.rows]
        _take_greatest(scores, probs, ids, logprobs)
        broken = ~(logprobs > 0)  # NaN is not above 0
        if self.device.type != "cpu" or broken.any():  # only a CPU can tell without waiting
            probs.masked_fill_(broken[:, None], 0.0)
            probs[:, 0].masked_fill_(broken, 1.0)
        level = level_of(scores, ids, logprobs.log())
        if chunk.drawn is not None:
            places = chunk.drawn.places
            all_mine = len(places) == len(probs)
            mine = probs if all_mine else probs[places]
            if chunk.truncation is not None:
                truncate(mine, chunk.truncation, self._room)
                if not all_mine:
                    probs[places] = mine
            ids[places], mass = choose(mine, draws[places])
            if chunk.drawn_is_truncated is not None:
                level.logprob[places] -= torch.where(chunk.drawn_is_truncated, mass.log(), 0.0)
        logprobs.copy_(logprobs_at(scores, ids, level))
        if (topped := chunk.topped) is not None:
            best = scores[topped.places]
            if chunk.topped_is_truncated is not None:
                removed = (probs[topped.places] == 0) & chunk.topped_is_truncated[:, None]
                best.masked_fill_(removed, float("-inf"))
            out.alternatives.append(alternatives_of(best, topped, level.at(topped.places), fetch))
        ids.masked_fill_(broken, BROKEN)

    @contextmanager
    def _threads(self, num_rows: int) -> Iterator[None]:
        """Use one thread for few rows: each of about ten small operators would end with a barrier of all threads."""
        threads = torch.get_num_threads()
        if self.device.type != "cpu" or num_rows >= PARALLEL_ROWS or threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _process(
        self,
        padded: Tensor,
        room: Tensor,
        chunk: Chunk,
        recent: Recent,
        early_stops: tuple[Tensor, Tensor] | None,
        words: Tensor | None,
    ) -> None:
        """Run all processors before truncation, in order, on scores [rows, padded vocab] in place; `room` is scratch
        memory of the same size."""
        scores = padded[:, : self._vocab_size]
        if chunk.watermarked is not None and recent.green is not None:
            self._watermark.apply(scores, chunk.watermarked.places, recent.green)
        if chunk.repeating is not None and recent.seen is not None and chunk.repetition_penalty is not None:
            penalty.penalize_repetition(scores, chunk.repeating.places, recent.seen, chunk.repetition_penalty)
        if chunk.counted is not None and recent.generated is not None and chunk.counting_penalties is not None:
            places = chunk.counted.places
            penalty.penalize_counts(scores, room, places, recent.generated, chunk.counting_penalties)
        if chunk.biases is not None:
            penalty.add_biases(scores, *chunk.biases)
        if early_stops is not None:
            penalty.forbid(scores, *early_stops)
        if chunk.masked is not None and words is not None:
            self._constrainer.apply(scores, *chunk.masked.masks(words))
        if chunk.temperature is not None:
            # Relative to the maximum, so that a small temperature cannot overflow.
            scores.sub_(scores.amax(-1, keepdim=True)).div_(chunk.temperature)

    def _buffers(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The logits of some rows as float32 scores, and a buffer for probabilities; both [rows, padded vocab]."""
        num_rows = rows.stop - rows.start
        scores = self._scores[:num_rows]
        scores[:, : self._vocab_size].copy_(logits[rows])
        return scores, self._probs[:num_rows]

    def _empty(self, num_rows: int) -> Sampled:
        new = torch.empty if self._sampled_time is None else torch.zeros
        return Sampled(
            new(num_rows, dtype=torch.int64, device=self.device),
            new(num_rows, dtype=torch.float64, device=self.device),
        )


def _take_greatest(scores: Tensor, probs: Tensor, ids: Tensor, chosen: Tensor) -> None:
    """Write the greatest token of each row to `ids`, and its probability to `chosen`."""
    ids.copy_(greatest(scores))
    chosen.copy_(probs.gather(1, ids[:, None]).squeeze(1))
