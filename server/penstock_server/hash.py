"""Pseudorandom numbers as pure functions of their argument. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014;
    constants: Stafford's variant 13), a bijection of 64-bit numbers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
