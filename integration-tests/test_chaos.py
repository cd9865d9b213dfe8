"""Short runs of the faults that clients, workers and hosts cause. `bench/chaos.py` runs the same faults for hours."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from binary import Server, start
from client import connect
from fault import host, http2, network, slow
from fault.cancel import cancel, leaves_nothing_behind
from fault.drain import drain_servers, routed
from fault.kill import kill_workers
from fault.malformed import malform
from fault.mix import Answer, Repeated, Request, answer_of, answers, error_in, events, requests
from fault.probe import footprint, health, metrics, replica_workers, wait_for_rest, wait_until
from fault.soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.native]

SEED = "chaos"
NUM_PERMITS = 64
MIX = requests(12)
GROWTH_BYTES = 32 << 20  # allowed in a few seconds; bench/chaos.py finds slow leaks


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A batch smaller than the load, so that some requests are always queued, and short answers."""
    limits = ("--max-concurrent-requests", str(NUM_PERMITS), "--max-batch-size", "12", "--max-total-tokens", "1024")
    server = start(*limits)
    yield server
    assert server.stop() == 0
    assert not [line for line in server.lines if "panicked" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def expected(small: Server) -> list[Answer]:
    found = answers(small, MIX)
    assert found == answers(small, MIX)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_workers_change_no_answer(expected: list[Answer], num_ranks: int) -> None:
    mortal = start("--num-shard", str(num_ranks))
    try:
        kills = kill_workers(mortal, MIX, expected, 2, f"{SEED}/{num_ranks}")
    finally:
        assert mortal.stop() == 0
    assert not kills.differences
    assert kills.num_kills == 2
    assert kills.num_restarts >= 1
    assert kills.num_answers >= len(MIX)


def test_killed_replicas_change_no_answer(expected: list[Answer]) -> None:
    server = start("--replicas", "2")
    try:
        kills = kill_workers(server, MIX, expected, 4, f"{SEED}/replicas", replica_workers)
    finally:
        assert server.stop() == 0
    assert not kills.differences
    assert kills.num_kills == 4
    assert kills.num_answers >= len(MIX)


def test_servers_that_leave_and_join_a_router_change_no_answer(expected: list[Answer], tmp_path: Path) -> None:
    with routed(tmp_path, 2) as (router, servers):
        drains = drain_servers(router, servers, MIX, expected, 4, f"{SEED}/drains")
    assert not drains.differences
    assert drains.num_drains == 4
    assert drains.num_answers >= len(MIX)


def test_disconnects_at_any_moment_leak_nothing(small: Server, expected: list[Answer]) -> None:
    with leaves_nothing_behind(small, NUM_PERMITS):
        cancels = cancel(small, 60, SEED)
    assert cancels.num_cancels == 60
    assert answers(small, MIX) == expected


def test_malformed_requests_change_no_other_answer(small: Server, expected: list[Answer]) -> None:
    with leaves_nothing_behind(small, NUM_PERMITS):
        malformed = malform(small, MIX, expected, 150, SEED)
    assert not malformed.wrong, "\n".join(malformed.wrong)
    assert not malformed.differences
    assert malformed.num_answers >= len(MIX)


def test_slow_readers_delay_no_other_client(small: Server, expected: list[Answer]) -> None:
    before = footprint(small)
    with slow.slow_readers(small, 3):
        wait_until(lambda: metrics(small)["tgi_batch_current_size"] == 3, "the slow readers' sequences run")
        assert answers(small, MIX) == expected
        # The slow readers' sequences finish although their output is unread, so they hold no KV blocks.
        wait_for_rest(small)
        assert footprint(small).router_rss_bytes - before.router_rss_bytes < GROWTH_BYTES
    assert answers(small, MIX) == expected


def test_a_client_that_never_reads_is_disconnected(small: Server) -> None:
    with slow.slow_readers(small, 2) as (_, reads_nothing):
        wait_until(lambda: metrics(small).get("penstock_clients_given_up", 0.0) >= 1, "a client is given up")
        wait_until(lambda: slow.has_ended(reads_nothing), "its connection is closed")
        # The client received only what the socket buffers held.
        assert slow.rest(reads_nothing).count(b"data: ") < 400
    wait_for_rest(small)


def test_half_open_connections_delay_no_other_client(small: Server, expected: list[Answer]) -> None:
    before = footprint(small)
    with slow.half_open(small, 20) as clients:
        wait_until(
            lambda: footprint(small).router_files >= before.router_files + len(clients), "all clients are connected"
        )
        assert answers(small, MIX) == expected
    wait_until(lambda: footprint(small).router_files <= before.router_files, "their file descriptors are closed")


def test_a_client_machine_that_vanishes_is_detected() -> None:
    endless = Request("/generate_stream", {"inputs": "A:", "parameters": {"max_new_tokens": 8000, "ignore_eos": True}})
    try:
        with network.another_machine() as machine:
            server = start(hostname=machine.host)
            try:
                with machine.inside():
                    one = connect(server)
                    one.connect()
                    two = http2.Connection((machine.host, one.port), 60)
                one.request("POST", endless.path, endless.data, {"content-type": "application/json"})
                assert one.getresponse().readline().startswith(b"data:")
                two.read_events(two.post(endless.path, endless.data), 1)
                machine.vanish()
                wait_for_rest(server)
                assert not metrics(server).get("tgi_request_success"), "the requests were served to the end"
            finally:
                assert server.stop() == 0
    except network.NoMachineError as error:
        pytest.skip(f"cannot simulate another machine: {error}")


def test_memory_threads_and_files_do_not_grow_with_work(small: Server, expected: list[Answer]) -> None:
    soak(small, MIX, expected, 1.0, f"{SEED}/before", 1)
    before = footprint(small)
    soaked = soak(small, MIX, expected, 4.0, SEED, 2)
    assert not soaked.differences
    after = footprint(small)
    assert after.router_rss_bytes - before.router_rss_bytes < GROWTH_BYTES
    assert after.workers_rss_bytes - before.workers_rss_bytes < GROWTH_BYTES
    assert after.num_workers == before.num_workers
    # Threads for blocking work exit ten seconds after it.
    wait_until(
        lambda: (
            (now := footprint(small)).router_threads <= before.router_threads
            and now.router_files <= before.router_files
        ),
        "threads and files are as before",
    )


def test_a_suspended_server_resumes(small: Server, expected: list[Answer]) -> None:
    pids = [small.process.pid, *small.processes()]
    with Repeated(small, MIX, expected) as streams:
        begun = streams.progress()
        wait_until(lambda: streams.have_gone_on(begun, 3), "all streams run")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2)  # nothing changes in a suspended server, so there is no condition to wait for
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
    assert not streams.differences
    assert set(pids[1:]) <= set(small.processes())
    assert health(small) == 200


CHATTER = [Request("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 1}})] * 20


@pytest.mark.parametrize("log", ["full disk", "gone reader", "blocked reader"])
def test_a_log_that_cannot_be_written_blocks_no_request(log: str) -> None:
    outputs = {"full disk": host.full_disk, "gone reader": lambda: host.unread_pipe(False)}
    with outputs.get(log, lambda: host.unread_pipe(True))() as output:
        chatty = {"LOG_LEVEL": "debug,h2=trace,hyper=trace"}
        with host.logging_to(output, env=chatty) as server:
            # A pipe holds 64 KiB, so a logger that waits for the reader would block.
            for _ in range(5):
                assert all(len(answer[-1]) == 1 for answer in answers(server, CHATTER))


def test_clock_jumps_change_no_answer(expected: list[Answer]) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for a clock that jumps")
    with host.with_jumping_clock(compiler) as server:
        with Repeated(server, MIX, expected) as streams:
            wait_until(lambda: streams.num_answers >= len(MIX), "all requests are answered")
        assert not streams.differences
    years = {line[14:18] for line in server.lines if line.startswith('{"timestamp"')}
    assert len(years) > 1, "the clock did not jump"


def test_sigterm_under_load_ends_each_stream_exactly_once(expected: list[Answer]) -> None:
    server = start("--max-batch-size", "8")
    outcomes: list[tuple[int, list[dict]]] = []
    refused: list[str] = []

    def ask(n: int) -> None:
        got: list[dict] = []
        try:
            got.extend(events(server, MIX[n]))
        except OSError as error:
            refused.append(str(error))
        else:
            outcomes.append((n, got))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(MIX))]
    for thread in threads:
        thread.start()
    wait_until(lambda: metrics(server)["tgi_batch_current_size"] >= 8, "the batch is full")
    processes = server.processes()
    server.process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # the server may already have stopped
        wait_until(lambda: health(server) == 503, "the server reports that it is not ready")
    assert server.process.wait(120) == 0
    for thread in threads:
        thread.join()
    for n, got in outcomes:
        assert error_in(got) is None
        assert answer_of(got) == expected[n]
    assert all("503" in reason or "refused" in reason.lower() for reason in refused), refused
    assert len(outcomes) >= 8
    assert len(outcomes) + len(refused) == len(MIX)
    wait_until(
        lambda: not any(os.path.exists(f"/proc/{pid}/cmdline") for pid in processes), "all processes have exited"
    )
