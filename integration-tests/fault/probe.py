"""Observes a server from outside: its metrics, its health, and its processes in /proc."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from binary import TIMEOUT_S, Server, children, name
from client import ask


def metrics(server: Server) -> dict[str, float]:
    """Every sample of /metrics except histogram buckets, by name with labels."""
    text = ask(server, "/metrics").text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#") and "_bucket{" not in line]
    return {name: float(value) for name, _, value in lines if name}


def metric(server: Server, name: str) -> float:
    """One sample of /metrics; 0 if it does not exist yet."""
    return metrics(server).get(name, 0.0)


def health(server: Server) -> int:
    return ask(server, "/health").status


def restarts(server: Server) -> float:
    """Number of worker groups that were started in place of lost ones."""
    return metric(server, "penstock_worker_restarts")


def wait_until(condition: Callable[[], bool], what: str = "the condition", timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s} s this is still not true: {what}"
        time.sleep(0.02)


def wait_for_loss(server: Server, num_restarts: float) -> None:
    """Wait until the server has noticed the loss of a worker group. num_restarts: before the loss."""
    # A short restart may be over before the first look at the server's health.
    wait_until(lambda: health(server) == 503 or restarts(server) > num_restarts, "the server has noticed the loss")


def wait_for_restart(server: Server, num_restarts: float) -> None:
    """Wait until exactly one worker group was started in place of a lost one. num_restarts: before the loss."""
    wait_until(lambda: restarts(server) > num_restarts, "a worker group was started in place of a lost one")
    assert restarts(server) == num_restarts + 1


def is_at_rest(server: Server) -> bool:
    """Whether nothing runs, nothing is queued, and every block is allocatable."""
    now = metrics(server)
    is_idle = now["tgi_batch_current_size"] == 0 and now["tgi_queue_size"] == 0
    return is_idle and now["penstock_kv_free_blocks"] == now["penstock_kv_blocks"]


def wait_for_rest(server: Server) -> None:
    wait_until(lambda: is_at_rest(server), "nothing runs, nothing is queued, and all blocks are allocatable")


def serving_ranks(server: Server) -> list[int]:
    """Pids of the serving workers."""
    groups = server.worker_groups()
    return groups[0] if groups else []


def fork_servers(server: Server) -> list[int]:
    """Pids of the replicas' fork servers, in no order."""
    return sorted(children(server.process.pid) - server.renderer_pids())


def replica_workers(server: Server) -> list[int]:
    """Pids of all replicas' workers."""
    forked = [pid for fork_server in fork_servers(server) for pid in children(fork_server)]
    return [pid for pid in forked if name(pid).startswith("worker-")]


@dataclass(frozen=True)
class Footprint:
    """Resources that the server holds. Proportional set size (PSS) counts a page shared by processes once. The workers'
    memory includes the fork server's."""

    router_rss_bytes: int
    router_pss_bytes: int
    workers_rss_bytes: int
    workers_pss_bytes: int
    router_threads: int
    router_files: int
    num_workers: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def footprint(server: Server) -> Footprint:
    router, workers = server.process.pid, server.worker_pids()
    router_rss, router_pss = memory_bytes(router)
    of_workers = [memory_bytes(pid) for pid in (server.fork_server_pid(), *workers)]
    return Footprint(
        router_rss,
        router_pss,
        sum(rss for rss, _ in of_workers),
        sum(pss for _, pss in of_workers),
        len(list(Path(f"/proc/{router}/task").iterdir())),
        len(list(Path(f"/proc/{router}/fd").iterdir())),
        len(workers),
    )


def memory_bytes(pid: int) -> tuple[int, int]:
    """(resident, proportional) set size in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["Rss"], sizes["Pss"]
