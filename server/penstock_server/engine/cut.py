"""Where the weights of a row's keys, in ascending order, first reach a mass: what top-k, top-p and typical-p all ask.

Without sorting: a histogram by the keys' upper bits tells the bin, and only what lies in that bin is sorted. Weights
are whole numbers, so sums are exact and depend on no order, no thread and no neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ONE = 1 << 44  # the weight of probability 1; what is less likely than 1 / ONE weighs nothing
_SHIFT = 16
_HIGHEST = 128.0
_NUM_BINS = 0x4300  # of the bits of floats below _HIGHEST


@dataclass(frozen=True, slots=True)
class Cut:
    """What stays of each row: keys below `key`, and of its equals, in the order of ids, the first `num_equals`."""

    key: Tensor  # [rows] int32
    num_equals: Tensor  # [rows] int64


def weights_of(probs: Tensor) -> Tensor:
    """Probabilities as whole numbers, int64."""
    return (probs * float(ONE)).long()


def ascending_keys(values: Tensor) -> Tensor:
    """Keys (int32) in the order of non-negative floats; infinity and all from 128 on are equals."""
    return values.clamp(max=_HIGHEST * (1 - 2.0**-24)).view(torch.int32)


def descending_keys(probs: Tensor) -> Tensor:
    """Keys (int32) that ascend where probabilities descend."""
    return _ONE_BITS - probs.view(torch.int32)


_ONE_BITS = 0x3F800000  # of 1.0f


def target_of(share: Tensor, total: Tensor) -> Tensor:
    """The mass that is a share [rows] float64 of a total [rows] int64: at least 1, at most the total."""
    return torch.minimum((share * total).ceil().long(), total).clamp_(min=1)


def find_cut(keys: Tensor, weights: Tensor, mass: Tensor) -> Cut:
    """The shortest beginning of each row, by keys and then ids, that weighs at least `mass`.

    keys [rows, width] int32 below 2**31 - 2**24, weights [rows, width] int64 ≥ 0 and equal for equal keys unless only
    `key` matters, mass [rows] int64, from 1 to the row's total.
    """
    num_rows, width = keys.shape
    bins = (keys >> _SHIFT).long()
    ends = torch.zeros((num_rows, _NUM_BINS), dtype=torch.int64, device=keys.device).scatter_add_(1, bins, weights)
    ends = ends.cumsum_(-1)
    chosen = torch.searchsorted(ends, mass[:, None])
    before = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0).squeeze(1)
    places = (bins == chosen).view(-1).nonzero().squeeze(1)
    rows = places // width
    order_keys, order = ((rows << 32) + keys.view(-1)[places]).sort()
    inside = weights.view(-1)[places][order]
    sums = inside.cumsum(0)
    starts = torch.searchsorted(order_keys, torch.arange(num_rows, device=keys.device) << 32)  # of each row's part
    missing = mass - before + _sum_before(sums, inside, starts)
    at = torch.searchsorted(sums, missing)
    first_equal = torch.searchsorted(order_keys, order_keys[at])
    weight = inside[at]
    num_equals = (missing - _sum_before(sums, inside, first_equal) + weight - 1) // weight
    return Cut((order_keys[at] & 0x7FFFFFFF).int(), num_equals)


def keep(values: Tensor, keys: Tensor, cut: Cut, *, all_equals: bool) -> None:
    """Set what is cut off to 0, in place; `keys` are those of `values` [rows, width]."""
    limit = cut.key[:, None]
    values.masked_fill_(keys > limit, 0.0)
    if all_equals:
        return
    rows, ids = (keys == limit).nonzero(as_tuple=True)
    first = torch.searchsorted(rows, torch.arange(len(keys), device=keys.device))
    rank = torch.arange(len(rows), device=keys.device) - first[rows]
    too_many = rank >= cut.num_equals[rows]
    values[rows[too_many], ids[too_many]] = 0.0


def _sum_before(sums: Tensor, values: Tensor, places: Tensor) -> Tensor:
    return sums[places] - values[places]
