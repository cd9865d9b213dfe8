"""Choosing by a random number from probabilities, whole or truncated by top-k, top-p and min-p, without a full sort.

Whole: the inverse of the cumulative probability in the order of ids, first by blocks and then inside one. Truncated:
the same in the order of descending probability (ties: lower id first), for which only the head of that order is
needed. A few columns with the greatest maxima give it: everything above the maximum of the columns left out is certain
to be there. Rows whose cut lies deeper are done again with more columns. INVARIANT: the head is the same whatever the
number of columns, so no row's result depends on how deep it or its neighbours had to look.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock_server.engine.greedy import BLOCK

# How many columns to look at, in this order, before all of them. A GPU sorts whole rows at once.
_COLUMNS = (64, 256)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Where each row's distribution is cut; a token must pass all three. top_p counts what top_k left."""

    top_k: Tensor  # [rows] int64; 0: all; equals of the last one stay
    top_p: Tensor  # [rows] float64 in (0, 1]
    min_p: Tensor  # [rows] float32 in [0, 1], of the greatest probability

    def of(self, rows: slice, places: Tensor) -> Truncation:
        """Of some places in a range of rows."""
        return Truncation(self.top_k[rows][places], self.top_p[rows][places], self.min_p[rows][places])


def choose_whole(probs: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, vocab] float32 and [rows] in [0, 1) → ids and their probabilities (float64)."""
    rows = torch.arange(probs.shape[0], device=probs.device)
    blocks = probs.view(probs.shape[0], -1, BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    targets = draws * ends[:, -1]
    block = torch.searchsorted(ends, targets[:, None], right=True).squeeze(1).clamp_(max=blocks.shape[1] - 1)
    inside = blocks[rows, block].double()
    cumulative = inside.cumsum(-1)
    rest = targets - torch.where(block > 0, ends[rows, (block - 1).clamp_(min=0)], 0.0)
    # The sum of a block was rounded, so the rest may lie behind its last token: then take the last that can be.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    place = torch.minimum((cumulative <= rest[:, None]).sum(-1), last)
    return block * BLOCK + place, inside[rows, place]


def choose_truncated(probs: Tensor, cut: Truncation, draws: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, vocab] float32 and [rows] in [0, 1) → ids and their probabilities (float64) among what is left."""
    num_columns = probs.shape[1] // BLOCK
    ids = torch.empty(probs.shape[0], dtype=torch.int64, device=probs.device)
    chosen = torch.empty(probs.shape[0], dtype=torch.float64, device=probs.device)
    tiers = [size for size in _COLUMNS if size < num_columns] if probs.device.type == "cpu" else []
    left = torch.arange(probs.shape[0], device=probs.device)
    for columns in (*tiers, num_columns):
        everything = columns == num_columns
        values, head_ids, floor = _head(probs if len(left) == probs.shape[0] else probs[left], columns)
        some_ids, some_chosen, certain = _choose_from_head(
            values, head_ids, floor, Truncation(cut.top_k[left], cut.top_p[left], cut.min_p[left]), draws[left]
        )
        ids[left] = some_ids
        chosen[left] = some_chosen
        if everything or bool(certain.all()):
            break
        left = left[~certain]
    return ids, chosen


def _head(probs: Tensor, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities of some columns in descending order, their ids, and what every probability left out is below.

    Only probabilities above that floor are sure to be complete and in their place.
    """
    num_rows, width = probs.shape
    all_columns = width // BLOCK
    ids = torch.arange(width, device=probs.device)
    if num_columns == all_columns:
        keys = _sorted(_descending_keys(probs, ids.expand(num_rows, -1)))
        floor = torch.full((num_rows,), -1.0, device=probs.device)
    else:
        # A column is every all_columns-th probability: the maximum over them is vectorized across columns.
        by_column = probs.view(num_rows, BLOCK, all_columns)
        maxima, columns = by_column.amax(1).topk(num_columns + 1, -1)
        floor = maxima[:, -1]
        columns = columns[:, None, :-1].expand(-1, BLOCK, -1)  # [rows, BLOCK, columns]
        head_ids = columns + torch.arange(0, width, all_columns, device=probs.device)[None, :, None]
        values = by_column.gather(2, columns).flatten(1)
        depth = int((values > floor[:, None]).sum(-1).max())
        # PERF: 0.7 ms for 32 × 4,096 of which 100 are wanted; sorting all of them takes 2.5 ms (EPYC, one thread).
        keys = _descending_keys(values, head_ids.flatten(1)).topk(max(depth, 1), -1, largest=False).values
    head_ids = keys & 0xFFFFFFFF
    values = ((head_ids - keys) >> 32).to(torch.int32).view(torch.float32)
    return values, head_ids, floor


def _descending_keys(probs: Tensor, ids: Tensor) -> Tensor:
    """Unique int64 keys that ascend where probabilities descend, and with the id among equals.

    The bits of non-negative floats are ordered as the floats are; the id stands in the lower half of the key.
    """
    return ids - (probs.contiguous().view(torch.int32).long() << 32)


def _sorted(keys: Tensor) -> Tensor:
    if keys.device.type != "cpu":
        return keys.sort(-1).values
    # PERF: numpy sorts int64 by AVX-512, twice as fast as torch (1.6 against 3.4 ms for 49,152, EPYC).
    return torch.from_numpy(np.sort(keys.numpy(), axis=-1))


def _choose_from_head(
    values: Tensor, ids: Tensor, floor: Tensor, cut: Truncation, draws: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, probabilities among what is left, and for which rows the head was deep enough to be sure."""
    width = values.shape[1]
    rows = torch.arange(values.shape[0], device=values.device)
    depth = (values > floor[:, None]).sum(-1)  # so many are certain
    cumulative = values.double().cumsum(-1)
    has_top_k = cut.top_k > 0
    k_th = values[rows, cut.top_k.clamp(1, width) - 1]
    after_top_k = torch.where(has_top_k, (values >= k_th[:, None]).sum(-1), width)
    total = torch.where(has_top_k, cumulative[rows, after_top_k - 1], 1.0)
    # A token stays while those before it have less than top_p together.
    after_top_p = torch.where(cut.top_p < 1, (cumulative < (cut.top_p * total)[:, None]).sum(-1) + 1, width + 1)
    least = cut.min_p * values[:, 0]
    after_min_p = (values >= least[:, None]).sum(-1)
    kept = torch.minimum(torch.minimum(after_top_k, after_top_p), after_min_p).clamp_(1, width)
    certain = torch.where(has_top_k, cut.top_k <= depth, (after_top_p <= depth) | (least > floor))
    mass = cumulative[rows, kept - 1]
    place = torch.minimum((cumulative <= (draws * mass)[:, None]).sum(-1), kept - 1)
    return ids[rows, place], values[rows, place].double() / mass, certain
