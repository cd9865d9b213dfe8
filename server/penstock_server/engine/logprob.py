"""Logprobs of any token, from the known logprob of the greatest token of its row; and the best tokens of each row.

A logprob is the score minus the logarithm of the row's sum of exponentials. The greatest token's logprob gives that
logarithm, so no logprob underflows, as the logarithm of a tiny probability would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock_server.engine.greedy import BLOCK
from penstock_server.plan import Top


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


def tops_of(scores: Tensor, top_n: Tensor, level: Level) -> list[Top]:
    """The top_n [rows] best tokens of each row of scores [rows, vocab]: lower ids first among equals, none at -inf."""
    ids = best_ids(scores, int(top_n.max()))
    found = scores.gather(1, ids.clamp(min=0))
    columns = torch.arange(ids.shape[1], device=ids.device)
    counts = ((ids >= 0) & (columns < top_n[:, None])).sum(-1)
    listed = zip(ids.tolist(), level.logprobs(found).tolist(), counts.tolist(), strict=True)
    return [tuple(zip(row[:count], logprobs[:count], strict=True)) for row, logprobs, count in listed]


def best_ids(scores: Tensor, num: int) -> Tensor:
    """[rows, num] int64, best first, lower ids first among equals; -1 where a row has fewer tokens above -inf."""
    num = min(num, scores.shape[1])
    # `num` blocks have a maximum at the bound or above it, hence at least `num` tokens are.
    is_blocked = scores.shape[1] % BLOCK == 0 and scores.shape[1] // BLOCK >= num
    maxima = scores.view(len(scores), -1, BLOCK).amax(-1) if is_blocked else scores
    bound = maxima.topk(num, -1).values[:, -1:].clamp(min=torch.finfo(scores.dtype).min)
    rows, ids = _where_at_least(scores, bound)
    order = np.lexsort((-_host(scores[rows, ids].double()), _host(rows)))  # stable: equals stay in the order of ids
    rows, ids = rows[_like(order, rows)], ids[_like(order, rows)]
    rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    inside = rank < num
    best = torch.full((len(scores), num), -1, dtype=torch.int64, device=scores.device)
    best[rows[inside], rank[inside]] = ids[inside]
    return best


def _where_at_least(scores: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and ids of the scores [rows, vocab] that reach their row's bound [rows, 1]."""
    if scores.device.type != "cpu":
        rows, ids = (scores >= bound).nonzero(as_tuple=True)
        return rows, ids
    # PERF: 10 times as fast as torch's nonzero.
    places = torch.from_numpy(np.flatnonzero(np.greater_equal(scores.numpy(), bound.numpy())))
    return places // scores.shape[1], places % scores.shape[1]


def _host(values: Tensor) -> Any:
    return values.cpu().numpy()


def _like(order: Any, tensor: Tensor) -> Tensor:
    return torch.from_numpy(order).to(tensor.device)
