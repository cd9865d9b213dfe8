"""Workers are forked: each with its flags, its output and its own end; none outlives the process it was forked from."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from penstock_server.errors import ConfigError
from penstock_server.pb import worker_pb2 as pb
from penstock_server.pb import worker_pb2_grpc as rpc
from penstock_server.process.fork_server import Signal, Start, parse
from penstock_server.protocol.config import Node, WorkerConfig
from penstock_server.protocol.endpoint import TcpEndpoint, Tls, UnixEndpoint

TIMEOUT_S = 240
# Its workers import nothing: they say what they are and have, and wait for a signal.
PROGRAM = """
import os, signal, sys
from penstock_server.process.fork_server import ForkServer

def run(config, load_model):
    if config.rank == 7:
        raise ValueError("rank 7")
    own_group = os.getpgrp() == os.getpid()
    print(*filter(None, [load_model]), config.rank, config.world_size, config.endpoint, own_group, flush=True)
    print(*sorted(os.listdir("/proc/self/fd")), file=sys.stderr, flush=True)
    signal.pause()

ForkServer(run, preload=bytes.decode).serve()
"""


class Pipe:
    """A FIFO with its reader, which any process may write to."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, enough: Callable[[str], bool] = lambda text: False) -> str:
        """What was written, until it is enough or every writer has closed the pipe."""
        text = b""
        while not enough(text.decode()):
            assert select.select([self._file], [], [], TIMEOUT_S)[0], f"nothing after {text!r}, and it is open"
            received = os.read(self._file, 4096)
            if not received:
                break
            text += received
        return text.decode()

    def line(self) -> str:
        return self.read(lambda text: text.endswith("\n")).rstrip()


@dataclass
class Forked:
    """A worker."""

    pid: int
    socket: Path
    stdout: Pipe
    stderr: Pipe


class Launcher:
    """What the launcher does."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"},
        )

    def send(self, **request: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, kind: str) -> dict[str, Any]:
        """The next report, which is of that kind."""
        assert self.process.stdout is not None
        report = json.loads(self.process.stdout.readline())
        assert list(report) == [kind], report
        return report[kind]

    def start(self, name: str, rank: int = 0) -> Forked:
        socket = self._folder / name
        stdout, stderr = (Pipe(self._folder / f"{name}.{kind}") for kind in ("stdout", "stderr"))
        paths = {
            "endpoint": f"unix:{socket}",
            "token": "",
            "node": None,
            "stdout": str(stdout.path),
            "stderr": str(stderr.path),
        }
        self.send(start={"name": name, "rank": rank, "world_size": 8, **paths})
        started = self.hear("started")
        assert started["name"] == name
        return Forked(started["pid"], socket, stdout, stderr)

    def signal(self, name: str, number: int) -> None:
        self.send(signal={"name": name, "number": number})

    def last_words(self) -> tuple[int, str]:
        """Its exit status, and what it said on standard error."""
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, said.decode()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, "-c", PROGRAM)
    launcher.hear("ready")
    yield launcher
    launcher.process.kill()
    launcher.process.communicate()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie has none
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.01)


def test_each_worker_has_its_flags_its_files_and_its_end(launcher: Launcher) -> None:
    first, second = launcher.start("worker-0.1", 1), launcher.start("worker-0.2", 2)
    for rank, worker in ((1, first), (2, second)):
        assert worker.stdout.line() == f"{rank} 8 unix:{worker.socket} True"
        assert worker.stderr.line() == "0 1 2 3"  # 3 is of the listing itself
        assert Path(f"/proc/{worker.pid}/comm").read_text() == f"worker-0.{rank}\n"
    launcher.signal("worker-0.1", signal.SIGKILL)
    assert launcher.hear("ended") == {"name": "worker-0.1", "status": signal.SIGKILL}
    assert first.stdout.read() + first.stderr.read() == ""  # and no other process has them open
    launcher.signal("worker-0.1", signal.SIGKILL)  # too late, and no harm
    launcher.signal("worker-0.2", signal.SIGTERM)
    assert launcher.hear("ended") == {"name": "worker-0.2", "status": signal.SIGTERM}


def test_a_worker_that_raises_says_so_and_exits_with_status_1(launcher: Launcher) -> None:
    worker = launcher.start("worker", 7)
    assert launcher.hear("ended") == {"name": "worker", "status": 1 << 8}
    assert "ValueError: rank 7" in worker.stderr.read()


def test_a_worker_whose_output_nobody_reads_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    paths = {"endpoint": f"unix:{missing}", "token": "", "node": None, "stdout": missing, "stderr": missing}
    launcher.send(start={"name": "worker", "rank": 0, "world_size": 1, **paths})
    refused = launcher.hear("refused")
    assert refused["name"] == "worker"
    assert "No such file" in refused["reason"]
    launcher.start("another")


@pytest.mark.parametrize("end", ["kill", "end of input"])
def test_its_end_ends_its_workers(launcher: Launcher, end: str) -> None:
    worker = launcher.start("worker")
    worker.stdout.line()
    if end == "kill":
        launcher.process.kill()
    assert launcher.last_words()[0] == (-signal.SIGKILL if end == "kill" else 0)
    worker.stdout.read()
    wait_until_gone(worker.pid)


START = {
    "name": "a",
    "endpoint": "unix:s",
    "rank": 1,
    "world_size": 2,
    "token": "t",
    "node": None,
    "stdout": "out",
    "stderr": "err",
}
NODE = {
    "local_rank": 0,
    "local_size": 1,
    "uses_gpu": True,
    "listen": "[::1]:8",
    "certificate": "c",
    "key": "k",
    "authority": "a",
}


def test_requests_are_understood_or_refused() -> None:
    assert parse(json.dumps({"start": START}).encode()) == Start(
        "a", WorkerConfig(UnixEndpoint(Path("s")), 1, 2, "t"), "out", "err"
    )
    tls = Tls("c", "k", "a")
    config = WorkerConfig(TcpEndpoint("::1", 7, tls), 1, 2, "t", Node(0, 1, ("::1", 8), tls, "t", uses_gpu=True))
    on_node = START | {"endpoint": "https://[::1]:7", "node": NODE}
    assert parse(json.dumps({"start": on_node}).encode()) == Start("a", config, "out", "err")
    assert parse(b'{"signal": {"name": "a", "number": 9}}') == Signal("a", 9)
    for change in ({"rank": 2}, {"rank": -1}, {"rank": "1"}, {"endpoint": None}):
        with pytest.raises(ConfigError, match="neither a start nor a signal"):
            parse(json.dumps({"start": START | change}).encode())
    # TCP only with certificates; and a refusal does not print the token.
    with pytest.raises(ConfigError, match=r"worker a cannot be started: .* must be unix:PATH, or https") as refusal:
        parse(json.dumps({"start": START | {"endpoint": "https://a:1", "token": "hunter2"}}).encode())
    assert "hunter2" not in str(refusal.value)
    for line in (b"", b"\xff", b"[]", b'{"signal": {"name": "a"}}'):
        with pytest.raises(ConfigError, match="neither a start nor a signal"):
            parse(line)


def test_real_workers_ignore_sigint_and_exit_0_on_sigterm_and_what_is_no_request_is_named(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "-m", "penstock_server.process.fork_server")
    launcher.hear("ready")
    assert len(list(Path(f"/proc/{launcher.process.pid}/task").iterdir())) == 1
    # Two with gRPC after each other, from one process.
    for name in ("worker-0", "worker-1"):
        worker = launcher.start(name)
        with grpc.insecure_channel(
            f"unix:{worker.socket}", options=[("grpc.max_reconnect_backoff_ms", 100)]
        ) as channel:
            stub = rpc.WorkerStub(channel)
            stub.Health(pb.HealthRequest(), wait_for_ready=True, timeout=TIMEOUT_S)
            launcher.signal(name, signal.SIGINT)
            stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S)
    for name in ("worker-0", "worker-1"):
        launcher.signal(name, signal.SIGTERM)
        assert launcher.hear("ended") == {"name": name, "status": 0}
        assert not (tmp_path / name).exists()
    launcher.send(begin={"name": "worker"})
    reason = (
        'error: the request \'{"begin": {"name": "worker"}}\' is neither a start nor a signal of a worker, nor a load'
    )
    status, said = launcher.last_words()
    assert (status, said.splitlines()[-1]) == (1, reason)


def test_a_worker_of_an_own_model_imports_nothing_more() -> None:
    program = """
import sys
from penstock_server.process.fork_server import _import_all
_import_all()
before = set(sys.modules)
from pathlib import Path
import subprocess, json
folder = json.loads(subprocess.check_output([sys.executable, "-m", "penstock_server.prepare"]))["folder"]
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.engine import Engine
engine, _ = Engine.load(LoadConfig(Path(folder), 16), 0, 1)
engine.warm_up(WarmUpConfig(max_step_tokens=16, max_step_sequences=2, num_blocks=20, proven=True))
print(*sorted({name for name in set(sys.modules) - before if name.startswith(("penstock", "torch", "gguf"))}))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).strip() == ""


@pytest.mark.parametrize("has_gpu", [False, True])
def test_triton_is_imported_where_there_is_a_gpu_and_cuda_is_never_touched(has_gpu: bool, tmp_path: Path) -> None:
    """A process cannot use CUDA if the one it was forked from has initialized it."""
    driver = tmp_path / "nvidiactl"
    if has_gpu:
        driver.touch()
    program = f"""
import pathlib, sys
import torch
import torch._C

def refuse(*arguments):
    raise AssertionError("CUDA is touched")

# Whatever asks about devices ends in one of these.
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice", "_cuda_isInBadFork"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, refuse)
for name in ("_lazy_init", "is_available", "device_count", "_device_count_nvml", "_raw_device_count_nvml"):
    assert hasattr(torch.cuda, name), name
    setattr(torch.cuda, name, refuse)

from penstock_server.host import nvidia
from penstock_server.process.fork_server import _import_all
nvidia.DRIVER = pathlib.Path({str(driver)!r})
_import_all()
mapped = pathlib.Path("/proc/self/maps").read_text()
print(
    "triton" in sys.modules,
    torch.cuda.is_initialized(),
    any(library in mapped for library in ("libcuda.so", "libnvidia-ml.so")),
    len(list(pathlib.Path("/proc/self/task").iterdir())),
)
"""
    threads = {"OPENBLAS_NUM_THREADS": "1"}  # as the launcher sets it
    environment = {**os.environ, **threads, "PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_INTERPRET": "0"}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert printed.split() == [str(has_gpu), "False", "False", "1"]


def test_workers_get_the_model_that_was_loaded_before_their_fork(launcher: Launcher) -> None:
    launcher.send(load={"request": b"the-model".hex()})
    assert launcher.hear("loaded")["seconds"] >= 0
    for name in ("first", "second"):
        assert launcher.start(name).stdout.line().startswith("the-model 0 8 ")


def test_without_a_model_that_could_be_loaded_workers_start_and_load_it_themselves(launcher: Launcher) -> None:
    launcher.send(load={"request": "ff"})  # not a text
    assert launcher.start("worker").stdout.line().startswith("0 8 ")


def test_imports_without_bytecode_on_disk_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "packages" / "example").mkdir(parents=True)
    (tmp_path / "packages" / "example" / "__init__.py").touch()
    program = "import example\nfrom penstock_server.host import log\n"
    program += "from penstock_server.process import fork_server\nlog.configure()\n"
    program += "fork_server.check_bytecode(example)"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "packages"), str(Path(__file__).parents[2])]),
        "PYTHONPYCACHEPREFIX": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def warnings() -> list[str]:
        command = [sys.executable, "-c", program]
        lines = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True).stderr
        return [json.loads(line)["message"] for line in lines.splitlines()]

    (warning,) = warnings()
    assert warning.startswith("example has no bytecode on disk")
    assert warning.endswith(f"run: {sys.executable} -m compileall -q {tmp_path / 'packages'}")
    environment["PYTHONDONTWRITEBYTECODE"] = ""
    assert warnings() == []
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    assert warnings() == []
