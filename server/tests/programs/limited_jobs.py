"""A limited process whose jobs do what they are told to."""

from __future__ import annotations

import os
from typing import Any

from penstock_server.host.limited_process import Job, Limits, serve

LIMITS = Limits(time_s=1.0, memory_bytes=64 << 20, stack_bytes=8 << 20)


def work(values: dict[str, Any], data: bytes) -> Job:
    """values: `spins`: never ends; `num_bytes_allocated`: at a time."""
    while values.get("spins"):
        pass
    allocated = bytes(values.get("num_bytes_allocated", 0))
    return {"pid": os.getpid(), "num_bytes_allocated": len(allocated)}, data


if __name__ == "__main__":
    serve(LIMITS, lambda: work)
