"""How much memory a rank may give to its KV pool: measured after the most expensive step, never estimated.

On a CPU, the limit is the smaller of the machine's memory and the control group's; on a GPU, the device's memory.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

# The default pool on a CPU: this size, or this many of the longest sequences if that is more. It is not all memory,
# because a CPU server usually shares the machine, and touching pages costs start-up time.
DEFAULT_CPU_POOL_BYTES = 1 << 30
DEFAULT_CPU_POOL_SEQUENCES = 4
_LIBC = ctypes.CDLL(None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_BYTES = 64 << 20
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

    fraction: float  # of the total, for all ranks together
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
    free = memory.available - (1 - share.fraction) * memory.total
    usable = free / share.num_ranks - memory.transient
    if share.cap_bytes is not None:
        usable = min(usable, memory.available / 2 / share.num_ranks, share.cap_bytes)
    return max(0, int(usable))


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


def touch_pages_in_background(tensors: Sequence[torch.Tensor]) -> None:
    """Back the pages from a thread while the tensors are in use. Where the system cannot keep their contents, pages
    are backed at their first use."""

    def touch() -> None:
        for tensor in tensors:
            if not _populate(tensor):
                return

    if tensors and tensors[0].device.type == "cpu":
        threading.Thread(target=touch, name="pages", daemon=True).start()


def _populate(tensor: torch.Tensor) -> bool:
    """Back the tensor's pages by madvise(2), which keeps their contents. Returns whether the system can."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # In pieces: madvise locks the process's mappings while it runs.
    for address in range(begin, end, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, end - address)
        if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            return False
    return True


def return_free_pages() -> None:
    """Give freed heap pages back to the system, where the C library can."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


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
