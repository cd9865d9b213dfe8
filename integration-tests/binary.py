"""Starts the real binary with the real embedded model and finds its address in the log."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PENSTOCK = Path(os.environ.get("PENSTOCK_BINARY", Path(sys.executable).parent / "penstock"))
START_TIMEOUT_S = 180
TIMEOUT_S = 240  # for what takes seconds at most on an idle machine
WORKER_NAME = re.compile(r"worker-(?P<group>\d+)\.\d+")
RENDERER_NAME = "chat-renderer"


@dataclass
class Server:
    """A running server. `lines` is its log so far."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal and wait. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(TIMEOUT_S)

    def last_lines(self, count: int = 40) -> str:
        """The end of the log, for the message of a failed test."""
        return f"end of the log of the server (exit status {self.process.poll()}):\n" + "\n".join(self.lines[-count:])

    def fork_server_pid(self) -> int:
        """Pid of the process that forks the workers."""
        (pid,) = children(self.process.pid) - self.renderer_pids()
        return pid

    def renderer_pids(self) -> set[int]:
        """Pids of the processes that render chat templates."""
        return {pid for pid in children(self.process.pid) if name(pid) == RENDERER_NAME}

    def processes(self) -> list[int]:
        """Pids of the fork server and of all workers."""
        return [*(children(self.process.pid) - self.renderer_pids()), *self.worker_pids()]

    def worker_pids(self) -> list[int]:
        """Pids of all workers: one per rank and group."""
        return sorted(pid for child in children(self.process.pid) for pid in children(child))

    def worker_groups(self) -> list[list[int]]:
        """Pids of the workers by group: the serving group first, then the standby group."""
        groups: dict[int, list[int]] = {}
        for pid in self.worker_pids():
            if found := WORKER_NAME.fullmatch(name(pid)):
                groups.setdefault(int(found["group"]), []).append(pid)
        return [groups[number] for number in sorted(groups)]


def name(pid: int) -> str:
    """Name of a process, or an empty text if it has exited."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    except FileNotFoundError:
        return ""


def children(pid: int) -> set[int]:
    """Pids of the children of all threads of a process."""
    found: set[int] = set()
    with suppress(FileNotFoundError):  # it has exited
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process takes no instruction within the context."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


def launch(
    *arguments: str,
    hostname: str = "127.0.0.1",
    port: str | None = "0",
    env: dict[str, str] | None = None,
    through: Sequence[str] = (),
    command: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start the binary with JSON logs, by default on a free port; stdout also carries stderr. port: None if a variable
    of `env` sets it. through: a command that runs it. command: a subcommand."""
    place = ["--hostname", hostname, *([] if port is None else ["--port", port])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    if command:  # `penstock route` refuses what the tests' surroundings set for servers
        environment.pop("MAX_BATCH_TOTAL_TOKENS", None)
    return subprocess.Popen(
        [*through, PENSTOCK, *command, "--json-output", *place, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def logged(server: Server, prefix: str, key: str = "seconds", since: int = 0) -> dict[str, float]:
    """The values of `key` in the log after the first `since` lines, by the rest of the message after `prefix`."""
    records = [json.loads(line)["fields"] for line in server.lines[since:] if line.startswith("{")]
    found = [record for record in records if key in record and record.get("message", "").startswith(prefix)]
    return {record["message"].removeprefix(prefix): float(record[key]) for record in found}


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that no other process gets within the context. The server can bind it: it sets SO_REUSEADDR too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def start(
    *arguments: str,
    hostname: str = "127.0.0.1",
    port: str | None = "0",
    env: dict[str, str] | None = None,
    through: Sequence[str] = (),
    command: Sequence[str] = (),
    timeout_s: float = START_TIMEOUT_S,
) -> Server:
    """Like `launch`, and waits for the log line with the URL."""
    process = launch(*arguments, hostname=hostname, port=port, env=env, through=through, command=command)
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
    url = ready.get(timeout=timeout_s)
    if url is None:
        pytest.fail("the server did not become ready:\n" + "\n".join(server.lines[-30:]))
    server.url = url
    return server
