"""Reports the progress of long work in log lines: bytes done, total bytes, rate. Imports no torch."""

from __future__ import annotations

import sys
import time
from types import TracebackType

INTERVAL_S = 5.0


class Progress:
    """Prints to stderr at the start, every `interval_s` seconds and at the end. Quick work prints one line."""

    def __init__(self, what: str, total_bytes: int, interval_s: float = INTERVAL_S) -> None:
        self.what = what
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.interval_s = interval_s
        self.start = self.last = time.monotonic()

    def __enter__(self) -> Progress:
        print(self.what, file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.last > self.start:
            self._report("done: ")

    def advance(self, num_bytes: int) -> None:
        """Adds `num_bytes` to the finished bytes."""
        self.reach(self.done_bytes + num_bytes)

    def reach(self, done_bytes: int) -> None:
        """Sets the finished bytes."""
        self.done_bytes = done_bytes
        now = time.monotonic()
        if now - self.last >= self.interval_s:
            self.last = now
            self._report("")

    def _report(self, prefix: str) -> None:
        rate = self.done_bytes / 1e6 / max(1e-9, time.monotonic() - self.start)
        print(
            f"{prefix}{self.what}: {self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB, {rate:.0f} MB/s",
            file=sys.stderr,
            flush=True,
        )
