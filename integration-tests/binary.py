"""The real binary with the real embedded model: started with any arguments, found by its ready line."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PENSTOCK = Path(sys.executable).parent / "penstock"
START_TIMEOUT_S = 180
WORKER_NAME = re.compile(r"worker-(?P<group>\d+)\.\d+\n")


@dataclass
class Server:
    """A running server. `lines` is everything it has logged so far."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Ask it to stop; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout_s)

    def last_lines(self, count: int = 40) -> str:
        """What it said last, for a test's failure."""
        return f"the server (exit status {self.process.poll()}) said last:\n" + "\n".join(self.lines[-count:])

    def fork_server_pid(self) -> int:
        """The process from which the workers are forked."""
        (pid,) = children(self.process.pid)
        return pid

    def processes(self) -> list[int]:
        """Pids of all that it has started."""
        return [*children(self.process.pid), *self.worker_pids()]

    def worker_pids(self) -> list[int]:
        """One a rank, of every group."""
        return sorted(pid for child in children(self.process.pid) for pid in children(child))

    def worker_groups(self) -> list[list[int]]:
        """Pids of the workers by group: those that serve, then those in reserve, which wait to take their place."""
        groups: dict[int, list[int]] = {}
        for pid in self.worker_pids():
            with suppress(FileNotFoundError):  # it has died
                if found := WORKER_NAME.fullmatch(Path(f"/proc/{pid}/comm").read_text()):
                    groups.setdefault(int(found["group"]), []).append(pid)
        return [groups[number] for number in sorted(groups)]


def children(pid: int) -> set[int]:
    """Of all its threads."""
    found: set[int] = set()
    with suppress(FileNotFoundError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def launch(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The binary with JSON logs on stdout and stderr together."""
    return subprocess.Popen(
        [PENSTOCK, "--json-output", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
    )


def start(*arguments: str, hostname: str = "127.0.0.1") -> Server:
    """Start on a free port and wait for the line that says where it listens."""
    process = launch("--port", "0", "--hostname", hostname, *arguments)
    server = Server(process, "")
    ready: queue.Queue[str | None] = queue.Queue()

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line.rstrip())
            try:
                fields = json.loads(line).get("fields", {})
            except ValueError:
                continue
            if "url" in fields:
                ready.put(fields["url"])
        ready.put(None)

    threading.Thread(target=follow, daemon=True).start()
    url = ready.get(timeout=START_TIMEOUT_S)
    if url is None:
        pytest.fail("the server did not become ready:\n" + "\n".join(server.lines[-30:]))
    server.url = url
    return server
