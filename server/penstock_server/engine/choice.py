"""Choice of a token by a random number: invert the cumulative probability in the order of ids, first over blocks of
ids, then inside one block."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock_server.engine.greedy import BLOCK


def choose(probs: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [rows] and the rows' sums [rows] float64, for probs [rows, a multiple of BLOCK] float32 of any sum and draws
    [rows] in [0, 1)."""
    rows = torch.arange(probs.shape[0], device=probs.device)
    blocks = probs.view(probs.shape[0], -1, BLOCK)
    ends = _running_sums(blocks.sum(-1))
    targets = draws * ends[:, -1]
    block = torch.searchsorted(ends, targets[:, None], right=True).squeeze(1).clamp_(max=blocks.shape[1] - 1)
    cumulative = _running_sums(blocks[rows, block])
    rest = targets - torch.where(block > 0, ends[rows, (block - 1).clamp_(min=0)], 0.0)
    # The block's sum was rounded, so the rest may lie beyond its last token: take the last one with any probability.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    place = torch.minimum((cumulative <= rest[:, None]).sum(-1), last)
    return block * BLOCK + place, ends[:, -1]


def _running_sums(x: Tensor) -> Tensor:
    """[rows, n] float32, each row with a sum below 8 → float64. Sums of integers, because a GPU adds the floats of a
    single row in another order than those of several rows."""
    return (x.double() * 2.0**50).long().cumsum(-1).double() * 2.0**-50
