"""How far a GPU is with the work that was given to it.

The router takes a worker whose GPU finishes nothing for hung. The CPU time of a process that waits for its GPU says
nothing, since it may wait by asking again and again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Event(Protocol):
    """A `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has finished the work that was given to it before the event. Does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    num_finished: int  # marks that the device has reached, since the start
    is_busy: bool  # whether it has not reached the last one


class DeviceProgress:
    """Marks in the order of the device's work. The compute thread sets them, and any thread asks."""

    def __init__(self, record: Callable[[], Event]) -> None:
        """record: an event behind the work that was given to the device so far."""
        self._record = record
        self._lock = threading.Lock()
        self._unfinished: deque[Event] = deque()
        self._num_finished = 0

    def mark(self) -> None:
        """Behind the work that was given to the device so far."""
        event = self._record()
        with self._lock:
            self._unfinished.append(event)
            self._forget_finished()

    def ask(self) -> Progress:
        with self._lock:
            self._forget_finished()
            return Progress(self._num_finished, bool(self._unfinished))

    def _forget_finished(self) -> None:
        while self._unfinished and self._unfinished[0].query():
            self._unfinished.popleft()
            self._num_finished += 1
