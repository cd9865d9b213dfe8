"""The phases of starting up and how long each took, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of start-up."""

    name: str
    seconds: float


class PhaseClock:
    """Collects phases as they end."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; a phase that raises is not recorded."""
        started = time.monotonic()
        yield
        self.phases.append(Phase(name, time.monotonic() - started))
