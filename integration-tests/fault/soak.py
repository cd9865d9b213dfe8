"""Ordinary work, during which the server's resources must not grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from binary import Server

from .cancel import cancel
from .mix import Answer, Repeated, Request
from .probe import Footprint, footprint, wait_for_rest

WARM_UP_SHARE = 0.4  # share of the samples, during which allocators and caches fill up


@dataclass(frozen=True)
class Slope:
    """A least-squares line through samples, with the standard error of its slope.

    Neighbouring samples are correlated, so the true error is larger.
    """

    per_hour: float
    error_per_hour: float
    mean: float


@dataclass
class Soak:
    seconds: float = 0.0
    num_answers: int = 0
    num_cancels: int = 0
    samples: list[dict[str, float]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def slopes(self) -> dict[str, Slope]:
        """The growth per hour of each resource after the warm-up, in bytes or counts."""
        kept = self.samples[int(len(self.samples) * WARM_UP_SHARE) :]
        names = [name for name in Footprint.__annotations__ if len(kept) > 2]
        return {name: slope([s["hours"] for s in kept], [s[name] for s in kept]) for name in names}


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    num = len(times)
    time_mean, mean = sum(times) / num, sum(values) / num
    spread = sum((t - time_mean) ** 2 for t in times)
    rise = sum((t - time_mean) * (v - mean) for t, v in zip(times, values, strict=True)) / spread
    residual = sum((v - mean - rise * (t - time_mean)) ** 2 for t, v in zip(times, values, strict=True))
    return Slope(rise, math.sqrt(residual / (num - 2) / spread), mean)


def soak(
    server: Server,
    asked: Sequence[Request],
    expected: Sequence[Answer] | None,
    seconds: float,
    seed: str,
    num_samples: int,
    report: Callable[[Footprint], None] = lambda _: None,
) -> Soak:
    """Repeat streams while other clients disconnect. Samples are taken at rest, between rounds."""
    result, start, rounds = Soak(), time.monotonic(), 0
    round_s = seconds / num_samples
    while (elapsed := time.monotonic() - start) < seconds:
        with Repeated(server, asked, expected) as streams:
            while time.monotonic() - start < elapsed + round_s:
                result.num_cancels += cancel(server, 8, f"{seed}/{rounds}").num_cancels
                rounds += 1
        expected = streams.expected
        result.num_answers += streams.num_answers
        result.differences += streams.differences
        wait_for_rest(server)
        now = footprint(server)
        report(now)
        result.samples.append({"hours": (time.monotonic() - start) / 3600, **now.as_dict()})
    result.seconds = time.monotonic() - start
    return result
