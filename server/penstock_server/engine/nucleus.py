"""Choosing by a random number from probabilities, whole or truncated by top-k, top-p and min-p.

Whole: the inverse of the cumulative probability in the order of ids, first by blocks and then inside one. Truncated:
the same in the order of descending probability (ties: lower id first), for which only the head of that order is
needed. INVARIANT: where the head is certain it is the same however it was found, so no row's result depends on how
deep it or its neighbours had to look.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock_server.engine.greedy import BLOCK
from penstock_server.engine.head import Head, Truncation, finders


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
    ids = torch.empty(probs.shape[0], dtype=torch.int64, device=probs.device)
    chosen = torch.empty(probs.shape[0], dtype=torch.float64, device=probs.device)
    left = torch.arange(probs.shape[0], device=probs.device)
    for find in finders(probs):
        mine = probs if len(left) == len(probs) else probs[left]
        my_cut = cut.at(left)
        ids[left], chosen[left], certain = _choose_from_head(find(mine, my_cut), my_cut, draws[left])
        left = left[~certain]
        if not len(left):
            break
    return ids, chosen


def _choose_from_head(head: Head, cut: Truncation, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, probabilities among what is left, and for which rows the head was deep enough to be sure."""
    values, floor = head.values, head.floor
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
    return head.ids[rows, place], values[rows, place].double() / mass, certain
