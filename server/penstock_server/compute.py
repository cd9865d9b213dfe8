"""The one thread that touches torch: jobs are done one after the other, in the order in which they were posted.

One thread because OpenMP keeps a pool for each thread that enters it, and because a step's order is the protocol's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs jobs in order. A job handles its own errors; one that raises is a fault reported to `on_fault`."""

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._on_fault = on_fault
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def post(self, job: Callable[[], object]) -> None:
        """Do this after everything posted before."""
        self._jobs.put(job)

    def call(self, job: Callable[[], T]) -> T:
        """Post a job and wait for what it returns or raises."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, not swallowed
                done.set_exception(error)

        self.post(run)
        return done.result()

    def stop(self) -> None:
        """End after the jobs posted so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the boundary: nothing above could report it
                self._on_fault(error)
                return
