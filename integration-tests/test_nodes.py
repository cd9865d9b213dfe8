"""Ranks on two nodes, each with an address of its own, in one stage and in two: as a server whose ranks are on this
machine, and with the same tokens when a worker or a node is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest
from binary import PENSTOCK, START_TIMEOUT_S, Server, children, launch, start
from fault.probe import health, restarts, wait_for_restart, wait_until
from test_worker_death import Stream

pytestmark = pytest.mark.native

SECRET = "an integration test's secret, 32+ characters"
PARAMETERS = {"max_new_tokens": 120, "seed": 7, "do_sample": True, "temperature": 0.9}
# Stages, and ranks of each. A stage is on one node.
ONE_STAGE, TWO_STAGES_OF_TWO = (1, 2), (2, 2)
TWO_STAGES = pytest.param((2, 1), marks=pytest.mark.slow)
REQUESTS = [{"inputs": text, "parameters": PARAMETERS} for text in ("A long story:", "def fibonacci(n):")]


@dataclass
class Node:
    """A running `penstock node`."""

    process: subprocess.Popen[str]
    address: str

    def worker_pids(self) -> list[int]:
        return sorted(pid for child in children(self.process.pid) for pid in children(child))

    def listeners(self) -> set[str]:
        """The addresses on which this node and its workers listen."""
        inodes = set()
        for pid in (self.process.pid, *self.worker_pids()):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(file))
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        lines += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
        return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


def run_node(host: str, secret: Path, port: int = 0) -> Node:
    arguments = ["--listen", f"{host}:{port}", "--secret-file", str(secret)]
    process = subprocess.Popen(
        [PENSTOCK, "node", "--json-output", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    urls: Queue[str | None] = Queue()

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and (url := json.loads(line)["fields"].get("url")):
                urls.put(url)
        urls.put(None)

    Thread(target=follow, daemon=True).start()
    address = urls.get(timeout=START_TIMEOUT_S)
    assert address is not None, "the node did not start"
    return Node(process, address)


@dataclass
class Cluster:
    server: Server
    nodes: list[Node]
    secret: Path
    ranks_per_node: int

    def serves(self) -> bool:
        return health(self.server) == 200


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text(SECRET)
    return secret


@pytest.fixture(scope="module")
def nodes(secret: Path) -> Iterator[list[Node]]:
    nodes = [run_node(host, secret) for host in ("127.0.0.1", "127.0.0.2")]
    with ExitStack() as stack:

        @stack.callback
        def kill() -> None:
            for node in nodes:
                node.process.kill()
                node.process.wait()

        yield nodes
        for node in nodes:
            node.process.terminate()
            assert node.process.wait(START_TIMEOUT_S) == 0


def name_of(sizes: tuple[int, int]) -> str:
    return "{} stage(s) of {}".format(*sizes)


def on(*sizes: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cluster", sizes, indirect=True, ids=name_of, scope="module")


@pytest.fixture(scope="module", params=[ONE_STAGE, TWO_STAGES, TWO_STAGES_OF_TWO], ids=name_of)
def cluster(request: pytest.FixtureRequest, nodes: list[Node], secret: Path) -> Iterator[Cluster]:
    num_stages, num_shards = request.param
    addresses = ",".join(node.address for node in nodes)
    sizes = ("--pipeline-parallel-size", str(num_stages), "--num-shard", str(num_shards))
    server = start("--ranks-on", addresses, "--node-secret-file", str(secret), *sizes)
    yield Cluster(server, nodes, secret, num_stages * num_shards // len(nodes))
    assert server.stop() == 0, server.last_lines()
    # The end of the server is the end of its workers.
    wait_until(lambda: not any(node.worker_pids() for node in nodes))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    """Results of one rank here."""
    return [stream.result() for stream in [Stream(server, request) for request in REQUESTS]]


def test_ranks_on_nodes_give_the_tokens_of_one_rank_here(cluster: Cluster, undisturbed: list[tuple]) -> None:
    assert [len(node.worker_pids()) for node in cluster.nodes] == [cluster.ranks_per_node] * 2
    assert [stream.result() for stream in [Stream(cluster.server, request) for request in REQUESTS]] == undisturbed


def answer_to_a_stranger(address: tuple[str, int]) -> bytes:
    """What a peer that speaks TLS and shows no certificate receives."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(ssl.SSLError, ConnectionError), socket.create_connection(address) as plain:
        stranger = context.wrap_socket(plain)
        stranger.sendall(b'{"version": 1, "num_ranks": 1}\n')
        return stranger.recv(1)
    return b""


@on(ONE_STAGE)
def test_nothing_listens_but_on_the_addresses_of_the_nodes_and_with_tls(cluster: Cluster) -> None:
    for node, host in zip(cluster.nodes, ("0100007F", "0200007F"), strict=True):
        listeners = node.listeners()
        assert len(listeners) == 2, "the node, and its one worker's gRPC"
        assert {address.split(":")[0][-8:] for address in listeners} == {host}
        for listener in listeners:
            address = (".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(listener.split(":")[1], 16))
            assert answer_to_a_stranger(address) == b""
    assert cluster.serves()


@on(ONE_STAGE, TWO_STAGES, pytest.param(TWO_STAGES_OF_TWO, marks=pytest.mark.slow))
def test_a_kill_of_a_worker_on_a_node_changes_no_token(cluster: Cluster, undisturbed: list[tuple]) -> None:
    before = restarts(cluster.server)
    streams = [Stream(cluster.server, request) for request in REQUESTS]
    wait_until(lambda: all(len(stream.events) > 5 for stream in streams))
    os.kill(cluster.nodes[1].worker_pids()[0], signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    wait_for_restart(cluster.server, before)


@on(ONE_STAGE, TWO_STAGES, TWO_STAGES_OF_TWO)
def test_a_kill_of_a_node_changes_no_token_once_it_is_back(cluster: Cluster, undisturbed: list[tuple]) -> None:
    wait_until(cluster.serves)
    before = restarts(cluster.server)
    streams = [Stream(cluster.server, request) for request in REQUESTS]
    wait_until(lambda: all(len(stream.events) > 5 for stream in streams))
    lost = cluster.nodes[0]
    lost.process.kill()
    lost.process.wait()
    wait_until(lambda: not cluster.serves())
    host, port = lost.address.removeprefix("node://").split(":")
    cluster.nodes[0] = run_node(host, cluster.secret, int(port))
    assert [stream.result() for stream in streams] == undisturbed
    wait_until(lambda: restarts(cluster.server) > before, "the ranks were started again")


def test_a_server_with_another_secret_is_refused(nodes: list[Node], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("another secret, of 32 characters or more")
    process = launch("--ranks-on", nodes[0].address, "--node-secret-file", str(secret))
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 1
    assert "does not have the secret of --node-secret-file" in output
