"""A file mapped into memory that forgets the pages it has shown, so that reading weights does not count them twice."""

from __future__ import annotations

import mmap
from pathlib import Path


class MappedFile:
    """Read-only in effect: the mapping is private, so that tensors over it need not be marked read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.size = len(self.data)

    def expect(self, start: int, num_bytes: int) -> None:
        """Let the system begin to read from the disk what will be looked at soon; returns at once.

        PERF: page faults alone read 128 kB at a time, and wait for each.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(start + num_bytes, self.size)
        if last > first and hasattr(mmap, "MADV_WILLNEED"):
            self.data.madvise(mmap.MADV_WILLNEED, first, last - first)

    def forget(self, start: int, stop: int) -> None:
        """Drop the pages that lie wholly inside [start, stop) from this process; they stay in the page cache."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        self.data.close()
