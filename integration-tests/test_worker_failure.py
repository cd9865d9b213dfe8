"""Workers that hang, that fail again during a restart, or that cannot be restarted."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from binary import TIMEOUT_S, Server, start
from fault.probe import health, restarts, wait_for_loss, wait_until
from reference_model import model_folder
from test_worker_death import REQUESTS, Stream, ranks

pytestmark = [pytest.mark.slow, pytest.mark.native]

FEW = REQUESTS[:4]
STEP_TIMEOUT_S = 6


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    server = start("--num-shard", "2", "--step-timeout", str(STEP_TIMEOUT_S))
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def undisturbed(two_ranks: Server) -> list[tuple]:
    return [stream.result() for stream in [Stream(two_ranks, request) for request in FEW]]


def running(server: Server) -> list[Stream]:
    """Streams that have received their first tokens."""
    streams = [Stream(server, request) for request in FEW]
    wait_until(lambda: all(len(stream.events) > 3 for stream in streams))
    return streams


def kill_all(server: Server) -> None:
    """Kill the serving group and the standby group."""
    for pid in [pid for group in server.worker_groups() for pid in group]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hung_rank_is_replaced(two_ranks: Server, undisturbed: list[tuple], rank: int) -> None:
    # The other rank waits inside a collective, but answers health probes.
    wait_until(lambda: health(two_ranks) == 200)
    before = restarts(two_ranks)
    streams = running(two_ranks)
    os.kill(ranks(two_ranks)[rank], signal.SIGSTOP)
    assert [stream.result() for stream in streams] == undisturbed
    wait_until(lambda: restarts(two_ranks) > before, "the group of the hung rank was replaced")
    wait_until(lambda: any(f"rank {rank} has not answered" in line for line in two_ranks.lines))


def test_a_suspended_server_resumes_with_the_same_workers(two_ranks: Server, undisturbed: list[tuple]) -> None:
    wait_until(lambda: health(two_ranks) == 200)
    before = restarts(two_ranks)
    streams = running(two_ranks)
    pids = [two_ranks.process.pid, *two_ranks.processes()]
    for signal_number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, signal_number)
        if signal_number == signal.SIGSTOP:
            time.sleep(
                STEP_TIMEOUT_S + 3
            )  # longer than the step deadline, which must not expire while the whole server is suspended
    assert [stream.result() for stream in streams] == undisturbed
    assert restarts(two_ranks) == before, two_ranks.last_lines()


def test_streams_survive_the_death_of_the_standby_group_and_of_its_successors(
    two_ranks: Server, undisturbed: list[tuple]
) -> None:
    wait_until(lambda: health(two_ranks) == 200)
    streams = running(two_ranks)
    lost = {pid for group in two_ranks.worker_groups() for pid in group}
    for _ in range(2):
        kill_all(two_ranks)
        wait_until(lambda gone=frozenset(lost): bool(set(two_ranks.worker_pids()) - gone))
        # The new workers are starting or loading, and are killed too.
        lost |= set(two_ranks.worker_pids())
    kill_all(two_ranks)
    assert [stream.result() for stream in streams] == undisturbed


def test_a_hung_fork_server_is_replaced(two_ranks: Server, undisturbed: list[tuple]) -> None:
    wait_until(lambda: health(two_ranks) == 200)
    streams = running(two_ranks)
    stopped = two_ranks.fork_server_pid()
    os.kill(stopped, signal.SIGSTOP)
    kill_all(two_ranks)
    assert [stream.result() for stream in streams] == undisturbed
    assert two_ranks.fork_server_pid() != stopped


def test_a_shutdown_during_a_restart_finishes_running_streams() -> None:
    server = start()
    streams, before = running(server), restarts(server)
    kill_all(server)
    wait_for_loss(server, before)
    server.process.send_signal(signal.SIGTERM)
    results = [stream.result() for stream in streams]
    assert all(text for _, text in results)
    assert server.process.wait(TIMEOUT_S) == 0, server.last_lines()


def test_workers_that_cannot_restart_end_the_server_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    server = start("--model-id", str(folder))
    streams = running(server)
    shutil.rmtree(folder)
    kill_all(server)
    assert server.process.wait(TIMEOUT_S) == 1, server.last_lines()
    for stream in streams:
        while stream.running():
            time.sleep(0.01)
        assert "5 failures in a row" in stream.events[-1]["error"], stream.events[-1]
        assert sum("error" in event for event in stream.events) == 1
    assert any("5 failures in a row without a finished step" in line for line in server.lines)
