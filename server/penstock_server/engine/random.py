"""Random numbers as a function of (seed, position), without generator state.

So a row's number depends on no other row, and is the same after a preemption or a replay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock_server.hash import GOLDEN, mix


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) with 52 random bits for each (seed, position)."""
    stream = mix(seeds + GOLDEN)
    bits = mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    # 52 and not 53: the number times a mass just above 1 must not round up to that mass.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
