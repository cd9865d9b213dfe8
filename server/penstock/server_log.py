"""The server's log: passed on to Python's logging as `penstock.server`, and searched for the reason of a failure."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from penstock.progress import StartProgress

_LOG = logging.getLogger("penstock.server")
_NUM_LINES = 20
_LEVELS = {"ERROR": logging.ERROR, "WARN": logging.WARNING, "INFO": logging.INFO}


class ServerLog:
    """Reads the lines of a server that logs JSON, in a thread of its own."""

    def __init__(self, lines: Iterable[str], progress: StartProgress) -> None:
        self._lines = lines
        self._progress = progress
        self._last: deque[str] = deque(maxlen=_NUM_LINES)
        self._errors: deque[str] = deque(maxlen=_NUM_LINES)
        self.is_ready: Future[bool] = Future()
        """Whether the server answers; False if it ended before that."""
        self._thread = threading.Thread(target=self._follow, name="penstock-log", daemon=True)
        self._thread.start()

    def wait_for_end(self) -> None:
        """Waits for the last line of a server that has ended."""
        self._thread.join()

    def reason(self) -> str:
        """The errors, or else the last lines."""
        return "\n".join(self._errors or self._last)

    def _follow(self) -> None:
        for line in self._lines:
            self._read(line.rstrip())
        self._decide(False)

    def _decide(self, is_ready: bool) -> None:
        if not self.is_ready.done():
            self._progress.close()
            self.is_ready.set_result(is_ready)

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
            level, fields = str(record["level"]), dict(record["fields"])
        except (ValueError, TypeError, KeyError):
            # A message about the command line, or a panic.
            self._last.append(line)
            _LOG.info("%s", line)
            return
        text = " ".join([str(fields.pop("message", "")), *(f"{name}={value}" for name, value in fields.items())])
        self._last.append(text)
        if level == "ERROR":
            self._errors.append(text)
        _LOG.log(_LEVELS.get(level, logging.DEBUG), "%s", text)
        self._progress.say(text)
        if "url" in fields:
            self._decide(True)
