"""ALiBi's slopes: heads look back over distances that grow by powers (https://arxiv.org/abs/2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Powers of 2^(-max_bias / n), n being the next power of two; where heads are fewer, every second one, and then
    those between."""
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-max_bias * (i + 1) / n) for i in range(n)]
    if n != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:num_heads])
