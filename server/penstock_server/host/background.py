"""Work that leaves the processors to everything else on the machine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# With a busy thread of normal priority on each core, work of this priority gets a tenth of it: enough to end in bounded
# time.
_NICENESS = 10

T = TypeVar("T")


def lower_priority() -> None:
    """Give this thread a low priority for the rest of its life. It does nothing on systems whose threads have none, and
    where the server was started with an even lower one: raising that needs a privilege."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread; does nothing for a CPU. Every thread that launches work on a GPU
    calls it first: each thread starts with GPU 0, where Triton launches kernels even if their tensors are on another
    GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def enter_background(device: torch.device) -> None:
    """What a thread of low priority that computes on the device calls first."""
    lower_priority()
    use_device(device)


def run_in_background(job: Callable[[], T], device: torch.device) -> T:
    """Run the job, which computes on the device, on a thread of low priority, and wait for it. Returns or raises what
    the job does.

    Threads that the job starts have this priority too. On Linux priorities belong to threads, and only a privileged
    process may raise one again: so the thread ends with the job, and the other threads keep their priority. Elsewhere
    the job has the priority of the process.
    """

    def run() -> T:
        enter_background(device)
        return job()

    with ThreadPoolExecutor(1, "background") as thread:
        return thread.submit(run).result()
