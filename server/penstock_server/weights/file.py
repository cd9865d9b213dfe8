"""A file of weights, read where it is asked for.

Read and not mapped. PERF: a mapping costs page faults (0.2 s/GB on one core of a Zen 5 virtual machine; reading into
memory that is in the cache 0.05 s/GB) and its pages count as ours. And a file that another process cuts off meanwhile
gives an error, where a mapping would end the process.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from penstock_server.errors import ConfigError


class WeightFile:
    """Open until `close`, or until nobody refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def expect(self, start: int, num_bytes: int) -> None:
        """Let the system begin to read from the disk what will be asked for soon; returns at once."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills a buffer of bytes. Raises ConfigError when the file ends before."""
        while buffer:
            num_bytes = os.preadv(self._descriptor, [buffer], start)
            if num_bytes == 0:
                raise ConfigError(f"{self.path} is truncated: it had {self.size} bytes and now ends at byte {start}")
            buffer, start = buffer[num_bytes:], start + num_bytes
