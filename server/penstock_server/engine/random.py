"""Random numbers without a generator: a function of (seed, position) only.

Two rounds of the splitmix64 finalizer (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014;
constants: Stafford's variant 13). A row's number cannot depend on its neighbours, on preemption or on a replay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 52 random bits for each (seed, position)."""
    stream = _mix(seeds + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 and not 53: the number times a mass just above 1 must not round up to that mass.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
