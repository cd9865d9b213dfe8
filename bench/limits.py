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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock_server.device.native.build import find_build
from penstock_server.device.native.ops import NativeLinear
from result import machine

MIN_READ_BYTES = 512 << 20
CACHES_READ = 4  # last-level caches' worth of bytes, so that little of the next pass is still in one
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
MATRIX_ROWS = 1536
WEIGHT_COLUMNS = 4096


def best_s(action: Callable[[], object], num_tries: int) -> float:
    """The shortest wall time of `num_tries` runs, after a warm-up run."""
    action()
    shortest = float("inf")
    for _ in range(num_tries):
        start = time.perf_counter()
        action()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def read_bytes() -> int:
    """The size of the memory to read: far more than the last-level cache."""
    try:
        size = LAST_LEVEL_CACHE.read_text(encoding="ascii").strip()
    except OSError:
        return MIN_READ_BYTES
    return max(MIN_READ_BYTES, CACHES_READ * int(size.removesuffix("K")) * 1024)


def read_bandwidth(huge_pages: bool) -> float:
    """Bytes per second read by a sum over a large float32 array, with torch's threads."""
    num_bytes = read_bytes()
    memory = mmap.mmap(-1, num_bytes)
    if huge_pages:
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.float32)
    array.fill(1.0)
    values = torch.from_numpy(array)
    return num_bytes / best_s(values.sum, 12)


def weight_bandwidth() -> float | None:
    """Bytes per second of weights that a native product with one row reads. None: there are no native kernels."""
    build = find_build(torch.device("cpu"), torch.bfloat16)
    if build is None:
        return None
    weight = torch.zeros(read_bytes() // (2 * WEIGHT_COLUMNS), WEIGHT_COLUMNS, dtype=torch.bfloat16)
    linear = NativeLinear.dense(build.kernels(torch.get_num_threads()), weight, None, gated=False)
    row = torch.ones(1, WEIGHT_COLUMNS, dtype=torch.bfloat16)
    return weight.nbytes / best_s(lambda: linear(row), 12)


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
        "read_bytes_per_s": {
            "ordinary_pages": read_bandwidth(False),
            "huge_pages": read_bandwidth(True),
            **({"native_product": native} if (native := weight_bandwidth()) else {}),
        },
        "product_flop_per_s": {"bf16": product_rate(torch.bfloat16), "f32": product_rate(torch.float32)},
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
