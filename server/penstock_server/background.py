"""Work that leaves the processors to everything else on the machine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# With a busy thread of normal priority on each core, work of this priority gets a tenth of it: enough to end in bounded
# time.
_NICENESS = 10

T = TypeVar("T")


def lower_priority() -> None:
    """Give this thread a low priority for the rest of its life. It does nothing on systems whose threads have none."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def run_in_background(job: Callable[[], T]) -> T:
    """Run the job on a thread of low priority, and wait for it. Returns or raises what it does.

    Threads that the job starts have this priority too. On Linux priorities belong to threads, and only a privileged
    process may raise one again: so the thread ends with the job, and the other threads keep their priority. Elsewhere
    the job has the priority of the process.
    """

    def run() -> T:
        lower_priority()
        return job()

    with ThreadPoolExecutor(1, "background") as thread:
        return thread.submit(run).result()
