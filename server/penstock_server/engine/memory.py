"""How much memory a rank may give to its KV pool: measured after the worst step, never guessed from tables.

On a CPU the limit is the smaller of the machine's memory and the control group's; on a GPU it is the device's.
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

# A server on a plain CPU shares the machine with others, and touching a page costs start-up time: without a word from
# the user a rank takes this, or room for so many of the longest sequences where that is more.
DEFAULT_CPU_POOL_BYTES = 1 << 30
DEFAULT_CPU_POOL_SEQUENCES = 4
_LIBC = ctypes.CDLL(None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_BYTES = 64 << 20
_UNLIMITED = 1 << 60  # control groups of version 1 say "no limit" by a huge number


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory as one rank sees it, in bytes."""

    total: int
    available: int  # not used by anybody
    transient: int  # how far the peak was above the beginning


@dataclass(frozen=True, slots=True)
class Share:
    """How a rank may use that memory."""

    fraction: float  # of the total, that may be used in all
    num_ranks: int  # that share it
    cap_bytes: int | None = None  # at most this, and at most half of what is available; None: no cap


class MemoryMeter:
    """Watches one device's memory from its making until `measure`."""

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
        """What there is, what is free, and how far the peak since the start was above the start.

        Above the start, not above now: what stays may have come before the peak or after it.
        `releasing` bytes are in use now and will be given back; they count as free.
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


def usable_bytes(memory: Memory, share: Share) -> int:
    """What one rank may allocate for good."""
    free = memory.available - (1 - share.fraction) * memory.total
    usable = free / share.num_ranks - memory.transient
    if share.cap_bytes is not None:
        usable = min(usable, memory.available / 2 / share.num_ranks, share.cap_bytes)
    return max(0, int(usable))


def default_cap_bytes(longest_sequence_bytes: int) -> int:
    """What one rank takes on a CPU when nobody says how much."""
    return max(DEFAULT_CPU_POOL_BYTES, DEFAULT_CPU_POOL_SEQUENCES * longest_sequence_bytes)


def touch_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Let the system back every page of the tensors now. What they hold may be lost; a new tensor holds nothing."""
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    # PERF: a virtual machine's host backs pages as they are touched, for each core by itself.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for tensor, is_touched in zip(on_cpu, threads.map(_populate, on_cpu), strict=True):
            if not is_touched:
                tensor.zero_()


def touch_pages_beside(tensors: Sequence[torch.Tensor]) -> None:
    """The same in a thread, while others use the tensors. Where the system cannot, pages come when they are used."""

    def touch() -> None:
        for tensor in tensors:
            if not _populate(tensor):
                return

    if tensors and tensors[0].device.type == "cpu":
        threading.Thread(target=touch, name="pages", daemon=True).start()


def _populate(tensor: torch.Tensor) -> bool:
    """Whether the system backed the tensor's pages, by madvise(2); their contents stay."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # In pieces: the process's other mappings cannot change meanwhile.
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
    """For people."""
    return f"{num_bytes / (1 << 20):.0f} MiB"


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status, which counts in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(f"/proc/self/status has no {field}")


def _reset_peak_resident() -> None:
    """Let VmHWM start from now. Where that is forbidden the peak of loading counts too, which errs to the safe side."""
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
