"""`python -m penstock_server.process.fork_server [--cores 0,1]`: imports once what every worker needs, and forks the
workers.

Reads requests of the launcher from stdin and writes reports to stdout, one JSON object per line. A worker's name is
unique in this process.

    {"start": {"name", "endpoint", "rank", "world_size", "token", "node", "stdout", "stderr"}}
                                        stdout and stderr are FIFOs; node is null if all ranks are on this machine, or
                                        {"local_rank", "local_size", "uses_gpu", "listen", "certificate", "key",
                                        "authority"}
    {"signal": {"name", "number"}}      sent to the worker and its children; ignored if the worker has exited
    {"load": {"request"}}               a LoadRequest in hexadecimal: loads its model for all workers that start later

    {"ready": {}}                       the imports are done
    {"loaded": {"seconds"}}             answers a load, unless each worker must load the model itself
    {"started": {"name", "pid"}}        answers a start, or:
    {"refused": {"name", "reason"}}
    {"ended": {"name", "status"}}       a status as returned by waitpid

This process exits when stdin ends, and its children are killed when it exits.
INVARIANT: it has one thread and has run no step, so in a child every lock is free and threads can be started.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import logging
import os
import pkgutil
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from penstock_server.errors import ConfigError
from penstock_server.host import log, nvidia
from penstock_server.host.heap import return_free_pages, use_one_arena
from penstock_server.protocol.config import Node, WorkerConfig
from penstock_server.protocol.endpoint import Tls, parse_address, parse_endpoint

if TYPE_CHECKING:
    from penstock_server.engine.load import LoadModel

    Run = Callable[[WorkerConfig, LoadModel | None], int]

logger = logging.getLogger(__name__)

_PACKAGES = ("device", "engine", "grammar", "layers", "models", "weights")
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_READ_BYTES = 1 << 16
_TASKS = Path("/proc/self/task")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Start:
    """A worker to fork. `stdout` and `stderr` are FIFOs that are open for reading."""

    name: str
    config: WorkerConfig
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal for a worker's process group."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Load:
    """A model to load here, so that the workers that are forked later share the pages of its weights."""

    request: bytes  # a LoadRequest


def parse(line: bytes) -> Start | Signal | Load:
    """Parse a line of stdin. Raises ConfigError if it is not a request."""
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    match request:
        case {
            "start": {
                "name": str(name),
                "endpoint": str(endpoint),
                "rank": int(rank),
                "world_size": int(world_size),
                "token": str(token),
                "node": node,
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
        } if 0 <= rank < world_size:
            try:
                place = _parse_node(node, token)
                where = parse_endpoint(endpoint, None if place is None else place.tls)
            except ValueError as error:
                raise ConfigError(f"worker {name} cannot be started: {error}") from error
            return Start(name, WorkerConfig(where, rank, world_size, token, place), stdout, stderr)
        case {"signal": {"name": str(name), "number": int(number)}}:
            return Signal(name, number)
        case {"load": {"request": str(request)}}:
            with suppress(ValueError):
                return Load(bytes.fromhex(request))
    if b'"token"' in line:
        line = b"(hidden)"
    raise ConfigError(
        f"the request {line.decode(errors='replace')!r} is neither a start nor a signal of a worker, nor a load"
    )


def _parse_node(node: object, token: str) -> Node | None:
    match node:
        case None:
            return None
        case {
            "local_rank": int(local_rank),
            "local_size": int(local_size),
            "uses_gpu": bool(uses_gpu),
            "listen": str(listen),
            "certificate": str(certificate),
            "key": str(key),
            "authority": str(authority),
        } if 0 <= local_rank < local_size:
            tls = Tls(certificate, key, authority)
            return Node(local_rank, local_size, parse_address(listen), tls, token, uses_gpu)
    raise ValueError("its place on the node is incomplete")


class ForkServer:
    """Forks children that execute `run` with their own configuration and exit with the status that it returns."""

    def __init__(self, run: Run, preload: Callable[[bytes], LoadModel | None]) -> None:
        self._run = run
        self._preload = preload
        self._load_model: LoadModel | None = None  # what the last load returned
        self._pids: dict[str, int] = {}
        self._pid = os.getpid()
        # The handler is empty. The wakeup byte in the pipe makes `serve` reap the child.
        self._wake, wake_in = os.pipe()
        os.set_blocking(wake_in, False)
        self._own_files = (self._wake, wake_in)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Answer requests until stdin ends. Raises ConfigError for an invalid request."""
        _keep_pages_shared()
        _report("ready")
        unread = b""
        while True:
            readable, _, _ = select.select([_STDIN, self._wake], [], [])
            if self._wake in readable:
                os.read(self._wake, _READ_BYTES)
                self._reap()
            if _STDIN in readable:
                received = os.read(_STDIN, _READ_BYTES)
                if not received:
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    self._answer(parse(line))

    def _answer(self, request: Start | Signal | Load) -> None:
        if isinstance(request, Load):
            self._load(request)
        elif isinstance(request, Start):
            try:
                pid = self._fork(request)
            except OSError as error:
                _report("refused", name=request.name, reason=str(error))
            else:
                self._pids[request.name] = pid
                _report("started", name=request.name, pid=pid)
        elif request.name in self._pids:
            # Until the child is reaped its pid cannot be reused.
            with suppress(ProcessLookupError):
                os.killpg(self._pids[request.name], request.number)

    def _load(self, request: Load) -> None:
        began = time.perf_counter()
        try:
            self._load_model = self._preload(request.request)
        except Exception as error:  # noqa: BLE001 - each worker loads it itself, and reports why it cannot
            logger.info("the model is not loaded before the workers start: %s", error)
        _keep_pages_shared()
        if self._load_model is not None:
            _report("loaded", seconds=time.perf_counter() - began)

    def _reap(self) -> None:
        for name, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[name]
                _report("ended", name=name, status=status)

    def _fork(self, start: Start) -> int:
        if _TASKS.exists() and (num_threads := len(list(_TASKS.iterdir()))) > 1:
            logger.warning("workers are forked from a process with %d threads; they may hang", num_threads)
        outputs: list[int] = []
        try:
            for path in (start.stdout, start.stderr):
                # Fails at once without a reader, because the launcher then no longer wants the worker.
                outputs.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                os.set_blocking(outputs[-1], True)
            pid = os.fork()
            if pid == 0:
                self._become_worker(start, outputs)
        finally:
            for file in outputs:
                os.close(file)
        # Parent and child both do this, so that the group exists before the first signal.
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid

    def _become_worker(self, start: Start, outputs: list[int]) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for file, place in zip((nothing, *outputs), (_STDIN, _STDOUT, _STDERR), strict=True):
                os.dup2(file, place)
            for file in (nothing, *outputs, *self._own_files):
                os.close(file)
            # SIGTERM would not end a worker that is inside a long native call.
            _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            _prctl(_PR_SET_NAME, ctypes.c_char_p(start.name.encode()))
            if os.getppid() == self._pid:  # the parent may have exited before the calls above
                gc.enable()
                status = self._run(start.config, self._load_model)
        except BaseException:
            logger.exception("the worker failed and exits")
        finally:
            os._exit(status)


def _keep_pages_shared() -> None:
    """Objects that exist now are permanent. The collector must not touch them, so that children share their pages."""
    gc.collect()
    return_free_pages()
    gc.freeze()


def _report(kind: str, **fields: str | float) -> None:
    line = json.dumps({kind: fields}).encode() + b"\n"
    while line:
        line = line[os.write(_STDOUT, line) :]


def _prctl(option: int, argument: object) -> None:
    """Does nothing except on Linux. On other systems a worker checks its parent itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl") and libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _import_all() -> tuple[Run, Callable[[bytes], LoadModel | None]]:
    """Import everything that a worker needs. Returns what a worker runs, and what loads its model before."""
    has_gpu = nvidia.DRIVER.exists()
    if not has_gpu:
        # Torch imports them if it can. They call the driver, and take 9 MiB.
        sys.modules["cuda.bindings"] = None  # type: ignore[assignment]
    import torch

    from penstock_server.device.native import build as native_build
    from penstock_server.process import worker

    for package in _PACKAGES:
        path = Path(__file__).parents[1] / package
        for module in pkgutil.walk_packages([str(path)], f"penstock_server.{package}."):
            # Triton takes long to import and may not be installed on a machine without a GPU.
            if has_gpu or not any(name in module.name for name in ("triton", "flash")):
                importlib.import_module(module.name)
    # The native kernels of the default data type.
    native_build.find_build(torch.device("cpu"), torch.bfloat16)
    check_bytecode(torch)
    return worker.run, worker.preload


def check_bytecode(module: ModuleType) -> None:
    """Warn if the bytecode of an imported package is not on disk, because every start then compiles all imports again.

    An import writes it, unless PYTHONDONTWRITEBYTECODE is set or the folder is read-only.
    """
    spec = module.__spec__
    if spec is None or spec.cached is None or spec.origin is None or Path(spec.cached).exists():
        return
    logger.warning(
        "%s has no bytecode on disk, so every start compiles the imported packages again; run: %s -m compileall -q %s",
        module.__name__,
        sys.executable,
        Path(spec.origin).parents[1],
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="penstock_server.process.fork_server")
    parser.add_argument("--cores", help="numbers of the cores that the workers run on, separated by commas")
    cores = parser.parse_args().cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if cores is not None:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    log.configure()
    use_one_arena()
    gc.disable()  # until a worker starts, because a collection would touch the pages that workers share
    try:
        ForkServer(*_import_all()).serve()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Without the interpreter's finalization, in which Triton's library prints what it considers leaks.
    os._exit(main())
