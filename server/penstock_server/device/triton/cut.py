"""The Triton kernel of truncation: see `cut.find_cut` and `cut.keep`, whose results it computes."""

import triton
import triton.language as tl


@triton.jit
def _weights(probs, place, mask, ONE: tl.constexpr, IS_COUNT: tl.constexpr):
    """`cut.weights_of`, or 1 for each. int64; 0 where the mask is not set."""
    if IS_COUNT:
        return mask.to(tl.int64)
    return (tl.load(probs + place, mask=mask, other=0.0) * ONE).to(tl.int64)


@triton.jit
def cut_kernel(
    probs,  # [rows, width] float32, in place
    keys,  # [rows, width] int32 ≥ 0
    mass,  # [rows] int64
    is_asked,  # [rows] bool: other rows stay as they are
    width,
    ONE: tl.constexpr,  # the weight of probability 1; a power of two
    IS_COUNT: tl.constexpr,  # each probability weighs 1
    ALL_EQUALS: tl.constexpr,  # keep all probabilities whose key equals the last one's
    BLOCK: tl.constexpr,
):
    """Sets the probabilities behind the shortest prefix, sorted by key and then id, that weighs at least `mass` to 0.
    Grid: rows.

    The last key of the prefix is found by two bits at a time, from the highest: each pass sums the weights of the keys
    below three candidates. Sums are of integers, so they depend on no order.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_asked + row) == 0:
        return
    probs += row * width
    keys += row * width
    wanted = tl.load(mass + row)
    last = 0  # the greatest key known to have less than `wanted` below it
    before = wanted * 0  # the weight of the keys below `last`
    for step in range(16):
        shift = 30 - 2 * step
        below_1 = tl.zeros([BLOCK], tl.int64)
        below_2 = tl.zeros([BLOCK], tl.int64)
        below_3 = tl.zeros([BLOCK], tl.int64)
        for start in range(0, width, BLOCK):
            place = start + tl.arange(0, BLOCK)
            mask = place < width
            distance = tl.load(keys + place, mask=mask, other=0) - last
            weight = _weights(probs, place, mask & (distance >= 0), ONE, IS_COUNT)
            digit = distance >> shift
            below_1 += tl.where(digit < 1, weight, 0)
            below_2 += tl.where(digit < 2, weight, 0)
            below_3 += tl.where(digit < 3, weight, 0)
        sum_1 = before + tl.sum(below_1, 0)
        sum_2 = before + tl.sum(below_2, 0)
        sum_3 = before + tl.sum(below_3, 0)
        digits = (sum_1 < wanted).to(tl.int32) + (sum_2 < wanted).to(tl.int32) + (sum_3 < wanted).to(tl.int32)
        last += digits << shift
        before = tl.where(sum_1 < wanted, sum_1, before)
        before = tl.where(sum_2 < wanted, sum_2, before)
        before = tl.where(sum_3 < wanted, sum_3, before)
    missing = wanted - before  # the weight that is still needed, from probabilities whose key is `last`
    kept = missing * 0
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < width
        key = tl.load(keys + place, mask=mask, other=0)
        is_kept = key < last
        is_last = mask & (key == last)
        if ALL_EQUALS:
            is_kept |= is_last
        else:
            # One is kept while those before it weigh less than what is missing.
            weight = _weights(probs, place, is_last, ONE, IS_COUNT)
            through = tl.cumsum(weight, 0)
            is_kept |= is_last & (kept + through - weight < missing)
            kept += tl.sum(weight, 0)
        tl.store(probs + place, 0.0, mask=mask & (is_kept == 0))
