"""--replicas 2: requests are spread, and kill -9 of one replica's processes stops no stream and changes no token."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from binary import TIMEOUT_S, Server, launch, start
from client import ask
from fault.probe import fork_servers, health, metric, metrics, restarts, wait_for_rest, wait_for_restart, wait_until
from fault.probe import replica_workers as workers
from random_adapter import make_adapter
from random_adapter import request as adapted
from test_worker_death import REQUESTS, TOKENS, Stream

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("replicas")]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GRAMMAR = {"inputs": "A person:", "parameters": {"max_new_tokens": 60, "grammar": {"type": "json", "value": SCHEMA}}}
# The stop sequence begins with the first tokens and ends after about forty: a death comes when a part of it is there.
STOP = {
    "inputs": "List: 1, 2, 3,",
    "parameters": {"max_new_tokens": TOKENS, "stop": [", ".join(str(number) for number in range(4, 16))]},
}
MIXED = [*REQUESTS, GRAMMAR, STOP]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapter = make_adapter(tmp_path_factory.mktemp("adapters") / "one", 1)
    adapters = ["--lora-adapters", f"one={adapter}", "--max-lora-rank", "8"]
    # A pause makes no replica unhealthy.
    server = start("--replicas", "2", "--step-timeout", str(2 * TIMEOUT_S), *adapters)
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def undisturbed(replicas: Server) -> list[tuple]:
    results = [stream.result() for stream in [Stream(replicas, request) for request in MIXED]]
    tokens, text = results[MIXED.index(STOP)]
    assert len(tokens) < TOKENS
    assert text.endswith(" 14, 15")
    return results


def sequences_by_replica(server: Server) -> list[float]:
    """Number of sequences that were routed to each of the two replicas."""
    found = metrics(server)
    return [found[f'penstock_replica_sequences{{replica="{replica}"}}'] for replica in range(2)]


def test_each_replica_has_processes_and_cores_of_its_own(replicas: Server) -> None:
    pids = workers(replicas)
    assert len(pids) == len(fork_servers(replicas)) == 2
    cores = [os.sched_getaffinity(pid) for pid in pids]
    if len(os.sched_getaffinity(0)) >= 2:
        assert not cores[0] & cores[1]
    assert any("standby is off (other replicas take over" in line for line in replicas.lines)
    capacity = metric(replicas, "tgi_batch_max_total_tokens")
    assert capacity == metric(replicas, "penstock_kv_blocks") * 16


def test_the_same_request_has_the_same_bits_in_each_replica(replicas: Server) -> None:
    body = {**REQUESTS[1], "parameters": {**REQUESTS[1]["parameters"], "max_new_tokens": 20, "details": True}}
    before = sequences_by_replica(replicas)
    first = ask(replicas, "/generate", body).json["details"]["tokens"]
    again = [Stream(replicas, body) for _ in range(12)]
    for stream in again:
        tokens, _ = stream.result()
        assert tokens == [(token["id"], token["logprob"], token["text"]) for token in first]
    after = sequences_by_replica(replicas)
    assert all(num_after > num_before for num_before, num_after in zip(before, after, strict=True))


@pytest.mark.parametrize("victims", ["worker", "fork server"])
def test_a_replicas_death_stops_no_stream_and_changes_no_token(
    replicas: Server, undisturbed: list[tuple], victims: str
) -> None:
    wait_until(lambda: len(workers(replicas)) == 2)
    find = workers if victims == "worker" else fork_servers
    for victim in range(2):
        before = restarts(replicas)
        statuses: list[int] = []
        stopped = threading.Event()

        def watch(statuses: list[int] = statuses, stopped: threading.Event = stopped) -> None:
            while not stopped.wait(0.05):
                statuses.append(health(replicas))

        watcher = threading.Thread(target=watch)
        watcher.start()
        streams = [Stream(replicas, request) for request in MIXED]
        wait_until(lambda streams=streams: sum(len(stream.events) > 5 for stream in streams) >= 6)
        os.kill(find(replicas)[victim], signal.SIGKILL)
        results = [stream.result() for stream in streams]
        stopped.set()
        watcher.join()
        assert results == undisturbed
        assert set(statuses) == {200}, "the other replica takes requests"
        wait_for_restart(replicas, before)
        wait_until(lambda: len(workers(replicas)) == 2)
    wait_for_rest(replicas)


def test_a_replicas_death_takes_no_adapter_from_its_streams(replicas: Server) -> None:
    prompts = ("A long story:", "The capital of France is", "def fibonacci(n):")
    requests = [adapted(prompt, adapter) for prompt in prompts for adapter in (None, "one")] * 2
    wait_until(lambda: len(workers(replicas)) == 2)
    expected = [stream.result() for stream in [Stream(replicas, request) for request in requests]]
    assert all(base != other for base, other in zip(expected[::2], expected[1::2], strict=True))
    for victim in range(2):
        before = restarts(replicas)
        streams = [Stream(replicas, request) for request in requests]
        wait_until(lambda streams=streams: sum(len(stream.events) > 5 for stream in streams) >= 8)
        os.kill(workers(replicas)[victim], signal.SIGKILL)
        assert [stream.result() for stream in streams] == expected
        wait_for_restart(replicas, before)
        wait_until(lambda: len(workers(replicas)) == 2)
    wait_for_rest(replicas)


def test_a_replica_that_was_replaced_serves_again(replicas: Server, undisturbed: list[tuple]) -> None:
    wait_until(lambda: len(workers(replicas)) == 2)
    victim = workers(replicas)[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(set(workers(replicas)) - {victim}) == 2)
    # Now the other one, without which only the new one is left.
    (other,) = set(workers(replicas)) - {max(workers(replicas))}
    streams = [Stream(replicas, request) for request in MIXED]
    wait_until(lambda: sum(len(stream.events) > 5 for stream in streams) >= 6)
    os.kill(other, signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed


def test_offloads_that_do_not_fit_together_are_refused() -> None:
    """Each alone fits in what is free."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    gib = int(meminfo["MemAvailable"].split()[0]) / (1 << 20)
    flags = ["--replicas", "2", "--kv-offload-gib", f"{0.7 * gib:.3f}", "--max-batch-total-tokens", "1024"]
    process = launch(*flags, "--max-total-tokens", "512")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert "the KV offload of 2 replicas needs" in output
    assert "lower --replicas or --kv-offload-gib" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "--replicas is 0, must be at least 1"),
        (["--replicas", "65"], "--replicas is 65, must be at most 64"),
        (["--replicas", "2", "--standby", "reserve"], "--standby is reserve, must be auto or off with --replicas"),
    ],
)
def test_a_number_that_cannot_be_is_refused(flags: list[str], message: str) -> None:
    process = launch(*flags)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert message in output
