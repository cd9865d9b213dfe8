"""Stands in for a device whose results arrive late: a CPU to which everything is copied as to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from penstock_server.engine import transfer


class LateEvent:
    """Stands in for an event of CUDA, which the device has not reached until it, or a later one, is awaited. `on_wait`
    is called whenever any is awaited."""

    num_recorded = 0
    num_reached = 0
    num_waits = 0
    num_timed = 0
    on_wait: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *, timed: bool = False) -> None:
        LateEvent.num_timed += timed
        LateEvent.num_recorded += 1
        self.number = LateEvent.num_recorded

    def elapsed_time(self, end: LateEvent) -> float:
        """Milliseconds."""
        if max(self.number, end.number) > LateEvent.num_reached:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 2.5

    def synchronize(self) -> None:
        LateEvent.num_reached = max(LateEvent.num_reached, self.number)
        LateEvent.num_waits += 1
        LateEvent.on_wait()


def page_locked(num_bytes: int) -> Any:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    return memory, memory.numpy()


def make_late(patch: pytest.MonkeyPatch) -> None:
    """Steps that run from now on copy their inputs and results."""
    patch.setattr(LateEvent, "num_waits", 0)
    patch.setattr(transfer, "is_needed", lambda device: True)
    patch.setattr(transfer, "page_locked", page_locked)
    patch.setattr(transfer, "record_event", LateEvent)
