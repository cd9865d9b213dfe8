"""The slopes of ALiBi, a geometric sequence over the heads (https://arxiv.org/abs/2108.12409, section 3)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Powers of 2^(-max_bias / n), where n is num_heads rounded up to a power of two; with fewer heads than n, first
    every second power, then the others."""
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-max_bias * (i + 1) / n) for i in range(n)]
    if n != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:num_heads])
