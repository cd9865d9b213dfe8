"""Logprobs of any token, from the known logprob of the greatest token of its row; and the best tokens of each row.

A logprob is the score minus the logarithm of the row's sum of exponentials. The greatest token's logprob gives that
logarithm, so no logprob underflows, as the logarithm of a tiny probability would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine.greedy import BLOCK
from penstock_server.engine.parameter import Asking
from penstock_server.engine.transfer import Fetch, Fetched
from penstock_server.protocol.plan import Top


@dataclass(frozen=True, slots=True)
class Level:
    """The greatest score of each row [rows], and its logprob [rows] float64."""

    score: Tensor
    logprob: Tensor

    def at(self, places: Tensor) -> Level:
        """The level of some rows."""
        return Level(self.score[places], self.logprob[places])

    def logprobs(self, scores: Tensor) -> Tensor:
        """Scores [rows, any] of those rows → logprobs float64."""
        # The difference in float32 has the same bits as when temperature has already subtracted the greatest score.
        return (scores.float() - self.score[:, None]).double() + self.logprob[:, None]


def level_of(scores: Tensor, greatest_ids: Tensor, logprobs: Tensor) -> Level:
    """The level of scores [rows, vocab], from the ids and logprobs [rows] of their greatest."""
    return Level(scores.gather(1, greatest_ids[:, None]).squeeze(1).float(), logprobs.double())


def logprobs_at(scores: Tensor, ids: Tensor, level: Level) -> Tensor:
    """The logprob [rows] float64 of one id in each row of scores [rows, vocab]."""
    return level.logprobs(scores.gather(1, ids[:, None])).squeeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """The best tokens of some rows, which are being copied to the host."""

    rows: npt.NDArray[np.int64]  # [asking] ascending
    top_n: npt.NDArray[np.int64]  # [asking] how many tokens a row asked for
    ids: Fetched  # [asking, most] int64, best first; -1 where a row has no more tokens
    logprobs: Fetched  # [asking, most] float64

    def renumbered(self, rows: npt.NDArray[np.int64]) -> Alternatives:
        """The same for rows with other numbers; [asking]."""
        return replace(self, rows=rows)

    def tops(self) -> dict[int, Top]:
        """By row. Waits for the copies."""
        tops: dict[int, Top] = {}
        lists = zip(self.rows.tolist(), self.top_n.tolist(), self.ids.wait(), self.logprobs.wait(), strict=True)
        for row, num, ids, logprobs in lists:
            num = min(num, int(np.count_nonzero(ids >= 0)))
            tops[row] = tuple(zip(ids[:num].tolist(), logprobs[:num].tolist(), strict=True))
        return tops


def tops_of(alternatives: Iterable[Alternatives]) -> dict[int, Top]:
    """All of a step's, by row."""
    return {row: top for each in alternatives for row, top in each.tops().items()}


def alternatives_of(scores: Tensor, asking: Asking, level: Level, fetch: Fetch) -> Alternatives:
    """The best tokens of scores [asking, vocab], lower ids first among equals, none at -inf. level: of these rows."""
    ids = best_ids(scores, int(asking.top_n.max()))
    found = level.logprobs(scores.gather(1, ids.clamp(min=0)))
    return Alternatives(asking.rows, asking.top_n, fetch(ids), fetch(found))


def best_ids(scores: Tensor, num: int) -> Tensor:
    """[rows, num] int64, best first, lower ids first among equals; -1 where a row has fewer tokens above -inf."""
    num = min(num, scores.shape[1])
    return (_best_ids_on_host if scores.device.type == "cpu" else best_ids_on_device)(scores, num)


def best_ids_on_device(scores: Tensor, num: int) -> Tensor:
    """Without reading anything on the host: the greatest keys of a score and an id, of which no two are equal."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(scores.shape[1], device=scores.device)
    found = ((ordered << 32) + (0xFFFFFFFF - ids)).topk(num, -1).values
    best = 0xFFFFFFFF - (found & 0xFFFFFFFF)
    return torch.where(scores.gather(1, best) == float("-inf"), -1, best)


def _best_ids_on_host(scores: Tensor, num: int) -> Tensor:
    # `num` blocks have a maximum at the bound or above it, hence at least `num` tokens are.
    is_blocked = scores.shape[1] % BLOCK == 0 and scores.shape[1] // BLOCK >= num
    maxima = scores.view(len(scores), -1, BLOCK).amax(-1) if is_blocked else scores
    bound = maxima.topk(num, -1).values[:, -1:].clamp(min=torch.finfo(scores.dtype).min)
    # PERF: 10 times as fast as torch's nonzero.
    places = np.flatnonzero(np.greater_equal(scores.numpy(), bound.numpy()))
    rows, ids = np.divmod(places, scores.shape[1])
    order = np.lexsort((-scores.numpy()[rows, ids].astype(np.float64), rows))  # stable: equals stay in the order of ids
    rows, ids = rows[order], ids[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    inside = rank < num
    best = np.full((len(scores), num), -1)
    best[rows[inside], rank[inside]] = ids[inside]
    return torch.from_numpy(best)
