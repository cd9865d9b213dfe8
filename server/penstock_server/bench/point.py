"""What is measured of a server at one concurrency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Percentiles:
        """Percentiles of all values: each is the smallest value that is at least its share of them."""
        ordered = sorted(values_ms)
        return cls(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Point:
    """A server at one concurrency. None: that was not measured."""

    concurrency: int
    tokens_per_s: float  # generated, by all streams together
    latency: Percentiles | None  # from sending a request to its last token
    ttft: Percentiles | None  # from sending a request to its first token
    gap: Percentiles | None  # between two tokens of a stream
    num_requests: int
    num_failed: int = 0
