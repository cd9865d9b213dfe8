"""Ranks on machines that Ray chooses: a real cluster on this machine and one in a network namespace, with Ray's TLS and
tokens. The tokens are those of one rank here, also when Ray's processes are killed."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest
from binary import START_TIMEOUT_S, Server, children, launch, start
from fault.network import Machine, NoMachineError, another_machine
from fault.probe import health, restarts, wait_until
from test_nodes import REQUESTS
from test_worker_death import Stream

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

RAY = Path(sys.executable).with_name("ray")
SUBNET = 84  # no other test's
ADDRESS = re.compile(r"--address='(\S+:\d+)'")
STARTED = re.compile("Ray runtime started")
# A raylet that was killed counts as dead after a second.
SETTINGS = {
    "RAY_USE_TLS": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "2",
}


@dataclass
class RayNode:
    """A running `ray start --block`: a raylet and what it needs. `lines` is its log so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def descendants(self, of: int | None = None) -> dict[int, str]:
        """The command line of each process of this machine, by pid."""
        found: dict[int, str] = {}
        for pid in children(of or self.process.pid):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except FileNotFoundError:
                continue
            found |= self.descendants(pid)
        return found

    def pids(self, part: str) -> list[int]:
        return [pid for pid, command in self.descendants().items() if part in command]

    def kill(self) -> None:
        for pid in (*self.descendants(), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def run_ray(
    *arguments: str, env: dict[str, str], through: Sequence[str] = (), until: re.Pattern[str] = STARTED
) -> RayNode:
    """Returns when the node is part of the cluster and has said so in a line like `until`."""
    common = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--log-color=false", "--block")
    process = subprocess.Popen(
        [*through, RAY, "start", *arguments, *common],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    node = RayNode(process)
    started: Queue[bool] = Queue()

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            node.lines.append(line)
            if until.search(line):
                started.put(True)
        started.put(False)

    Thread(target=follow, daemon=True).start()
    assert started.get(timeout=START_TIMEOUT_S), "".join(node.lines)
    return node


def make_tls(folder: Path, hosts: Sequence[str]) -> dict[str, str]:
    """An authority and a certificate for all of Ray's processes, as their variables."""

    def openssl(*arguments: str) -> None:
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        subprocess.run(["openssl", "req", "-x509", *new_key, *arguments], cwd=folder, check=True, capture_output=True)

    openssl("-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    names = "subjectAltName=DNS:localhost," + ",".join(f"IP:{host}" for host in hosts)
    openssl(*signed, "-keyout", "ray.key", "-out", "ray.pem", "-subj", "/CN=ray", "-addext", names)
    files = {"RAY_TLS_SERVER_CERT": "ray.pem", "RAY_TLS_SERVER_KEY": "ray.key", "RAY_TLS_CA_CERT": "ca.pem"}
    return {variable: str(folder / name) for variable, name in files.items()}


@dataclass
class Cluster:
    machine: Machine
    folder: Path
    env: dict[str, str]
    head: RayNode
    address: str
    other: RayNode

    def run_other(self) -> RayNode:
        """The other machine's Ray, with a temporary folder of its own."""
        mounted = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{self.folder}" && exec "$@"', "sh")
        through = ("ip", "netns", "exec", self.machine.name, *mounted)
        arguments = (f"--address={self.address}", f"--node-ip-address={self.machine.address}")
        return run_ray(*arguments, env=self.env, through=through)

    def pids(self, part: str) -> list[int]:
        """Process ids on both machines, the other machine's first."""
        return [pid for node in (self.other, self.head) for pid in node.pids(part)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with ExitStack() as stack:
        try:
            machine = stack.enter_context(another_machine(SUBNET))
        except NoMachineError as reason:
            pytest.skip(f"there is no second machine: {reason}")
        tls = make_tls(tmp_path_factory.mktemp("tls"), ("127.0.0.1", machine.host, machine.address))
        env = {**SETTINGS, **tls, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        # Short: the paths of Ray's sockets are below it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)))
        head = run_ray(
            "--head", "--port=0", f"--node-ip-address={machine.host}", "--include-dashboard=false",
            f"--temp-dir={folder}", env=env, until=ADDRESS,
        )  # fmt: skip
        stack.callback(head.kill)
        (address,) = ADDRESS.findall("".join(head.lines))
        cluster = Cluster(machine, folder, env, head, address, head)
        cluster.other = cluster.run_other()
        stack.callback(lambda: cluster.other.kill())
        yield cluster


STAGES = ("--pipeline-parallel-size", "2", "--num-shard", "1")


@pytest.fixture(
    scope="module", params=[("--num-shard", "2"), pytest.param(STAGES, marks=pytest.mark.slow)], ids=" ".join
)
def ray_server(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Server]:
    server = start("--ranks-on", f"ray://{cluster.address}", *request.param, env=cluster.env)
    yield server
    assert server.stop() == 0, server.last_lines()
    # The end of the server is the end of what it started on the machines.
    wait_until(lambda: not (cluster.pids("penstock node") or cluster.pids("-m penstock_server.")))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    """Results of one rank here."""
    return [stream.result() for stream in [Stream(server, request) for request in REQUESTS]]


def test_ranks_that_ray_places_give_the_tokens_of_one_rank_here(
    cluster: Cluster, ray_server: Server, undisturbed: list[tuple]
) -> None:
    assert [len(node.pids("penstock node")) for node in (cluster.head, cluster.other)] == [1, 1]
    assert [stream.result() for stream in [Stream(ray_server, request) for request in REQUESTS]] == undisturbed


def test_nodes_and_workers_do_not_have_the_cluster_s_token(cluster: Cluster, ray_server: Server) -> None:
    workers = cluster.pids("penstock_server.process.fork_server")
    assert len(workers) == 4, "a fork server and a worker on each machine"
    for pid in (*workers, *cluster.pids("penstock node")):
        assert cluster.env["RAY_AUTH_TOKEN"] not in Path(f"/proc/{pid}/environ").read_text()


def test_a_kill_of_an_actor_changes_no_token(cluster: Cluster, ray_server: Server, undisturbed: list[tuple]) -> None:
    before = restarts(ray_server)
    streams = [Stream(ray_server, request) for request in REQUESTS]
    wait_until(lambda: all(len(stream.events) > 5 for stream in streams))
    os.kill(cluster.pids("ray::NodeActor")[0], signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    wait_until(lambda: restarts(ray_server) > before, "a worker group was started in place of a lost one")


def test_a_kill_of_a_raylet_changes_no_token_once_its_machine_is_back(
    cluster: Cluster, ray_server: Server, undisturbed: list[tuple]
) -> None:
    before = restarts(ray_server)
    streams = [Stream(ray_server, request) for request in REQUESTS]
    wait_until(lambda: all(len(stream.events) > 5 for stream in streams))
    (raylet,) = cluster.other.pids("raylet/raylet ")
    nodes = cluster.other.pids("penstock node")
    os.kill(raylet, signal.SIGKILL)
    wait_until(lambda: health(ray_server) != 200)
    # The workers there end with the raylet, not with the next one.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in nodes))
    cluster.other.kill()
    cluster.other = cluster.run_other()
    assert [stream.result() for stream in streams] == undisturbed
    wait_until(lambda: restarts(ray_server) > before, "a worker group was started in place of a lost one")


@pytest.mark.slow
def test_a_kill_of_the_process_that_asks_ray_changes_no_token(
    cluster: Cluster, ray_server: Server, undisturbed: list[tuple]
) -> None:
    streams = [Stream(ray_server, request) for request in REQUESTS]
    wait_until(lambda: all(len(stream.events) > 5 for stream in streams))
    os.kill(ray_server.fork_server_pid(), signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed


def test_a_cluster_without_tls_is_refused() -> None:
    process = launch("--ranks-on", "ray://127.0.0.1:1", "--num-shard", "2", env={"RAY_USE_TLS": "0"})
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 1
    assert "RAY_USE_TLS is not 1" in output
