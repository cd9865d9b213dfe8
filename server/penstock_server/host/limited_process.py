"""A process that does untrusted work within limits, so that a hostile input cannot harm the worker.

Native code in a thread can be neither caught nor stopped. A process has limits of CPU time (a timer), memory and stack;
when it dies, the next job gets a new process. Jobs and answers are JSON objects on a line, each followed by bytes. It
imports only the standard library, because it is the memory of such processes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_START_LIMIT_S = 60.0  # CPU time until the process takes jobs
_READY = {"ready": True}
_NUM_BYTES = "num_bytes"
# What the process gets of the worker's environment: how programs are found and run. Tokens of the hub are not among it.
_ENVIRONMENT = ("HOME", "LANG", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
_ENVIRONMENT_PREFIXES = ("DYLD_", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")

Job = tuple[dict[str, Any], bytes]


class ProcessDiedError(Exception):
    """A job has ended its process. ran_out_of_time: by its limit of CPU time, otherwise by another."""

    def __init__(self, ran_out_of_time: bool) -> None:
        self.ran_out_of_time = ran_out_of_time


class LimitedProcess:
    """One process. `start` or the first job starts it; after a job that killed it, the next one does.

    Not thread-safe.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        """module: of this program, run with these arguments; it calls `serve`."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # the process takes jobs

    def start(self) -> None:
        """Starts the process if it is not running. Does not wait until it takes jobs."""
        if self._process is None:
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            inherited = {name: value for name, value in os.environ.items() if _is_inherited(name)}
            self._process = subprocess.Popen(  # noqa: S603 - this program itself
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**inherited, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def ask(self, values: dict[str, Any], data: bytes = b"") -> Job:
        """The answer to a job. Raises ProcessDiedError."""
        self.start()
        process = self._process
        assert process is not None
        answer = None
        try:
            answer = self._exchange(process, values, data)
        finally:
            if answer is None:
                self.close()
        if answer is None:
            raise ProcessDiedError(process.returncode == -signal.SIGPROF)
        return answer

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        self._is_ready = False
        if process is None:
            return
        process.terminate()  # a process that has already ended keeps its exit status
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _exchange(self, process: subprocess.Popen[bytes], values: dict[str, Any], data: bytes) -> Job | None:
        """None when the process died."""
        assert process.stdin is not None
        assert process.stdout is not None
        if not self._is_ready:
            self._is_ready = _read(process.stdout) is not None
            if not self._is_ready:
                return None
        try:
            _write(process.stdin, values, data)
        except BrokenPipeError:
            return None
        return _read(process.stdout)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a job may take."""

    time_s: float  # CPU time, so that a busy machine accepts the same jobs as an idle one
    memory_bytes: int  # address space, beyond what the process has when it is ready
    stack_bytes: int


def serve(limits: Limits, prepare: Callable[[], Callable[[dict[str, Any], bytes], Job]]) -> None:
    """The process: answers jobs with what `prepare` returns, until the worker exits."""
    # When memory runs out, the kernel should kill this process, not the worker.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (limits.stack_bytes, limits.stack_bytes))
    signal.setitimer(signal.ITIMER_PROF, _START_LIMIT_S)
    work = prepare()
    signal.setitimer(signal.ITIMER_PROF, 0)
    most = _mapped_bytes() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.nice(10)  # for jobs, which may take long; the first one waits for what is above
    source, target = sys.stdin.buffer, sys.stdout.buffer
    _write(target, _READY, b"")
    while (job := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.time_s)
        answer = work(*job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(target, *answer)


def _is_inherited(variable: str) -> bool:
    return variable in _ENVIRONMENT or variable.startswith(_ENVIRONMENT_PREFIXES)


def _mapped_bytes() -> int:
    """The address space of this process; 0 on systems that do not tell."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def _write(pipe: IO[bytes], values: dict[str, Any], data: bytes) -> None:
    pipe.write(json.dumps({**values, _NUM_BYTES: len(data)}).encode() + b"\n" + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Job | None:
    """None at the end of the pipe."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    values = json.loads(line)
    num_bytes = values.pop(_NUM_BYTES)
    data = pipe.read(num_bytes)
    return (values, data) if len(data) == num_bytes else None
