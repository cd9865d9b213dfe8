"""Measures this machine's limits: memory read bandwidth and matrix products.

Other figures are meaningful only as ratios to these, or to a peer in the same run, because the machines are shared.
Reports the best of several tries: a limit is what the machine reaches when nothing else runs.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from result import machine

READ_BYTES = 512 << 20  # far larger than any last-level cache
MATRIX_ROWS = 1536


def best_s(action: Callable[[], object], num_tries: int) -> float:
    """The shortest wall time of `num_tries` runs, after a warm-up run."""
    action()
    shortest = float("inf")
    for _ in range(num_tries):
        start = time.perf_counter()
        action()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def read_bandwidth(huge_pages: bool) -> float:
    """Bytes per second read by a sum over a large float32 array, with torch's threads."""
    memory = mmap.mmap(-1, READ_BYTES)
    if huge_pages:
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.float32)
    array.fill(1.0)
    values = torch.from_numpy(array)
    return READ_BYTES / best_s(values.sum, 12)


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square matrix product."""
    left = torch.randn(MATRIX_ROWS, MATRIX_ROWS).to(dtype)
    right = torch.randn(MATRIX_ROWS, MATRIX_ROWS).to(dtype)
    return 2 * MATRIX_ROWS**3 / best_s(lambda: left @ right, 12)


def measure() -> dict[str, Any]:
    """All limits, in bytes/s and FLOP/s, and the machine."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return {
        "machine": machine(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "read_bytes_per_s": {"ordinary_pages": read_bandwidth(False), "huge_pages": read_bandwidth(True)},
        "product_flop_per_s": {"bf16": product_rate(torch.bfloat16), "f32": product_rate(torch.float32)},
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
