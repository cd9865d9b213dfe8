"""Measures this machine's limits: memory read bandwidth and matrix products.

Other figures are meaningful only as ratios to these, or to a peer in the same run, because the machines are shared.
Reports the best of several tries: a limit is what the machine reaches when nothing else runs.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def machine() -> dict[str, Any]:
    """CPU model, cores, memory and the relevant instruction sets."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(facts.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16")
    return {
        "cpu": f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family', '?')}, "
        f"model {facts.get('model', '?')})",
        "vendor": {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(facts.get("vendor_id", ""), platform.machine()),
        "num_cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in wanted if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
    }


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
