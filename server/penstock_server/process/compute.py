"""The only thread that calls torch, except for a load in the background, during which it waits. It runs jobs one after
the other, in the order in which they were posted.

One thread, because OpenMP keeps a thread pool for each thread that calls it, and because steps must run in the
protocol's order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs jobs in order. A posted job must handle its own errors: one that it raises goes to `on_fault`, and ends the
    thread."""

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._on_fault = on_fault
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def post(self, job: Callable[[], object]) -> None:
        """Runs the job after all that were posted before. Returns at once."""
        self._jobs.put(job)

    def call(self, job: Callable[[], T]) -> T:
        """Posts a job and waits for it. Returns or raises what it does."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                done.set_exception(error)

        self.post(run)
        return done.result()

    def stop(self) -> None:
        """Ends the thread after the jobs that were posted so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: no caller could handle it
                self._on_fault(error)
                return
