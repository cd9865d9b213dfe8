"""How much memory a rank may give to its KV pool: measured after the most expensive step, never estimated.

On a CPU, the limit is the smaller of the machine's memory and the control group's; on a GPU, the device's memory.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock_server.host.background import lower_priority
from penstock_server.host.heap import return_free_pages

# The default pool on a CPU: this size, or this many of the longest sequences if that is more. It is not all memory,
# because a CPU server usually shares the machine, and touching pages costs start-up time.
DEFAULT_CPU_POOL_BYTES = 1 << 30
DEFAULT_CPU_POOL_SEQUENCES = 4
MIN_TOKEN_BYTES = 1 << 10  # a token without keys and values counts as this in the pool, whose bookkeeping has a limit
_LIBC = ctypes.CDLL(None)
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23  # the latter since Linux 5.14
# PERF: madvise locks the process's mappings while it backs a piece, and a thread of low priority may pause in it. A
# step that maps memory then waits for one huge page at most.
_POPULATE_BYTES = 2 << 20
_UNLIMITED = 1 << 60  # control groups version 1 express "no limit" as a huge number


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory as one rank sees it, in bytes."""

    total: int
    available: int
    transient: int  # the peak since the start, minus the usage at the start


@dataclass(frozen=True, slots=True)
class Share:
    """The part of that memory that a rank may use."""

    fraction: float  # share of the total memory, for all ranks together
    num_ranks: int  # ranks that share the memory
    cap_bytes: int | None = None  # at most this, and at most half of the available memory; None: no cap


class MemoryMeter:
    """Measures one device's memory from construction until `measure`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            return_free_pages()
            _reset_peak_resident()
            self._before = _status_bytes("VmRSS")

    def measure(self, releasing: int = 0) -> Memory:
        """The memory now, and the peak since the start relative to the start.

        Relative to the start, not to now: memory that stays may have been allocated before the peak or after it.
        `releasing` bytes are in use now but will be freed; they count as free.
        """
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            transient = torch.cuda.max_memory_allocated(self._device) - self._before
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self._device)
            return Memory(total, free + releasing, transient)
        transient = _status_bytes("VmHWM") - self._before
        return_free_pages()
        total, available = _host_memory()
        return Memory(total, available + releasing, max(0, transient))


def free_bytes(device: torch.device) -> int:
    """Memory of the device that no process uses; what torch keeps for later is given back before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return_free_pages()
    return _host_memory()[1]


def usable_bytes(memory: Memory, share: Share) -> int:
    """Bytes that one rank may allocate permanently."""
    usable: float = left_bytes(memory, share)
    if share.cap_bytes is not None:
        usable = min(usable, memory.available / 2 / share.num_ranks, share.cap_bytes)
    return max(0, int(usable))


def left_bytes(memory: Memory, share: Share) -> int:
    """Bytes of one rank's share that nothing needs. A negative number: the bytes that are missing."""
    free = memory.available - (1 - share.fraction) * memory.total
    return int(free / share.num_ranks - memory.transient)


def default_cap_bytes(longest_sequence_bytes: int) -> int:
    """The default pool of one rank on a CPU."""
    return max(DEFAULT_CPU_POOL_BYTES, DEFAULT_CPU_POOL_SEQUENCES * longest_sequence_bytes)


def touch_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Have the system back every page of the tensors now. Their contents may be lost."""
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    # PERF: a virtual machine's host backs pages as they are touched, on each core independently.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for tensor, is_touched in zip(on_cpu, threads.map(_populate, on_cpu), strict=True):
            if not is_touched:
                tensor.zero_()


def touch_pages_in_background(tensors: Sequence[torch.Tensor]) -> threading.Thread | None:
    """Back the pages of new tensors from a thread of low priority, while the tensors are in use already. Returns the
    thread, or None if all pages are backed now, because they are on a GPU or the system cannot keep their contents."""
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if not on_cpu or not _advise(_pages_of(on_cpu[0])[: mmap.PAGESIZE], _MADV_POPULATE_WRITE):
        touch_pages(on_cpu)
        return None

    def touch() -> None:
        lower_priority()
        for tensor in on_cpu:
            _populate(tensor)

    thread = threading.Thread(target=touch, name="pages", daemon=True)
    thread.start()
    return thread


def _populate(tensor: torch.Tensor) -> bool:
    """Back the tensor's pages by madvise(2), which keeps their contents. Returns whether the system can."""
    pages = _pages_of(tensor)
    pieces = (pages[first : first + _POPULATE_BYTES] for first in range(0, len(pages), _POPULATE_BYTES))
    return all(_advise(piece, _MADV_POPULATE_WRITE) for piece in pieces)


def release_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Give the pages of tensors on the CPU back to the system. Their contents are lost; a later use gets new pages."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and sys.platform == "linux":
            _advise(_pages_of(tensor), _MADV_DONTNEED)


def _pages_of(tensor: torch.Tensor) -> range:
    """The addresses of the whole pages inside a tensor."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    return range(begin, max(begin, (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE))


def _advise(pages: range, advice: int) -> bool:
    """madvise(2). Returns whether the system follows it."""
    return _LIBC.madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), advice) == 0


def mib(num_bytes: int) -> str:
    """A size for messages."""
    return f"{num_bytes / (1 << 20):.0f} MiB"


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status, which counts in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(f"/proc/self/status has no {field}")


def _reset_peak_resident() -> None:
    """Restart VmHWM. Where that is forbidden, the peak of loading counts too, which overestimates and is safe."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(total, available) of the machine or of the control group, whichever is less."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) << 10
    available = int(fields["MemAvailable"].split()[0]) << 10
    for limit_file, usage_file, stat_file, reclaimable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            limit = (cgroup / limit_file).read_text().strip()
            usage = int((cgroup / usage_file).read_text())
            stat = dict(line.split() for line in (cgroup / stat_file).read_text().splitlines())
        except OSError:
            continue
        if limit == "max" or int(limit) >= _UNLIMITED:
            continue
        total = min(total, int(limit))
        available = min(available, int(limit) - usage + int(stat.get(reclaimable, 0)))
    return total, max(0, available)
