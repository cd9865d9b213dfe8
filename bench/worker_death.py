"""Measures recovery: how long streams pause when a worker is killed, by phase, and whether first requests are slower.

The real server runs the embedded model. While streams run, a rank is killed (SIGKILL). The server's log gives the
phases of the pause; each client records its longest gap. Each kill is measured with and without a standby group.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
from compare import free_port, in_own_process, penstock_server
from load import percentile
from result import heading, keep
from table import markdown

STREAMS, TOKENS = 4, 400
PHASES = ("notice", "backoff", "stop", "spawn", "connect", "load", "warm_up", "first_token")
PATIENCE_S = 300.0
FIRST_REQUESTS = 20


@dataclass
class Running:
    """A server and its log."""

    process: subprocess.Popen[str]
    port: int
    records: list[dict[str, Any]] = field(default_factory=list)

    def wait_for(self, message: str, since: int) -> None:
        """Wait for a log record that contains `text`, after the first `since` records."""
        wait_until(lambda: any(record["message"].startswith(message) for record in self.records[since:]), message)

    def seconds_of(self, prefix: str) -> dict[str, float]:
        """The seconds of each start-up phase."""
        there = [record for record in self.records if record["message"].startswith(prefix) and "seconds" in record]
        return {record["message"].removeprefix(prefix): record["seconds"] for record in there}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Poll until `holds`; raises with `what` after the timeout."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"error: waited {PATIENCE_S:g} s for: {what}")
        time.sleep(0.005)


@contextmanager
def serving(num_ranks: int) -> Iterator[Running]:
    """Yields Penstock with the embedded model once it is ready, and stops it at the end."""
    port = free_port()
    server = penstock_server(["--num-shard", str(num_ranks), "--json-output", "--hostname", "127.0.0.1"])
    environment = {**os.environ, **server.environment}
    process = subprocess.Popen(server.command(port), stdout=subprocess.PIPE, text=True, env=environment)
    running = Running(process, port)

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                running.records.append({"message": "", **json.loads(line).get("fields", {})})
            except ValueError:
                continue

    threading.Thread(target=follow, daemon=True).start()
    try:
        running.wait_for("ready", 0)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def children(pid: int) -> set[int]:
    """Child processes of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def worker_groups(root: int) -> list[list[int]]:
    """Worker pids by group: the serving group, then the standby group."""
    groups: dict[int, list[int]] = {}
    for pid in sorted(pid for child in children(root) for pid in children(child)):
        if found := re.fullmatch(r"worker-(\d+)\.\d+\n", Path(f"/proc/{pid}/comm").read_text()):
            groups.setdefault(int(found[1]), []).append(pid)
    return [groups[number] for number in sorted(groups)]


def stream(port: int, prompt: str, arrivals: list[float]) -> None:
    """Runs one greedy stream and returns the arrival time of each event."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    body = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": TOKENS}})
    connection.request("POST", "/generate_stream", body, {"content-type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data:"):
            arrivals.append(time.perf_counter())
    connection.close()


def measure_kill(server: Running, index: int, with_reserve: bool, since: int) -> dict[str, Any]:
    """Kill a rank under running streams. `since`: number of log records before the serving group started."""
    server.wait_for("the standby group is ready", since)
    if not with_reserve:
        for pid in worker_groups(server.process.pid)[1]:
            os.kill(pid, signal.SIGKILL)
        server.wait_for("the standby group failed", since)
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    threads = [
        threading.Thread(target=stream, args=(server.port, f"Story {index}.{place}: once upon a time", arrivals[place]))
        for place in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(times) > 8 for times in arrivals), "the streams to begin")
    before = len(server.records)
    workers = worker_groups(server.process.pid)[0]
    os.kill(workers[index % len(workers)], signal.SIGKILL)
    server.wait_for("the model workers have recovered", before)
    for thread in threads:
        thread.join()
    timed = [record for record in server.records[before:] if "milliseconds" in record]
    found = {record["message"]: float(record["milliseconds"]) for record in timed}
    return {
        "with_reserve": with_reserve,
        "first_record": before,
        "phases_ms": {phase: found[f"restart phase {phase}"] for phase in PHASES},
        "total_ms": found["the model workers have recovered"],
        "longest_gap_ms": [max(b - a for a, b in itertools.pairwise(times)) * 1000 for times in arrivals],
    }


def first_requests(port: int) -> list[float]:
    """Milliseconds of each of the first requests after ready, sent one after the other, eight tokens each."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    times = []
    for number in range(FIRST_REQUESTS):
        body = json.dumps({"inputs": f"Request {number}: hello", "parameters": {"max_new_tokens": 8}})
        begin = time.perf_counter()
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        connection.getresponse().read()
        times.append((time.perf_counter() - begin) * 1000)
    return times


def measure(num_ranks: int, kills: int) -> dict[str, Any]:
    """Measures one server: its start, its first requests, its kills."""
    with serving(num_ranks) as server:
        result: dict[str, Any] = {"ranks": num_ranks, "start_s": server.seconds_of("phase ")}
        result["first_requests_ms"] = first_requests(server.port)
        result["kills"] = []
        since = 0
        for with_reserve in (True, False):
            for _ in range(kills):
                kill = measure_kill(server, len(result["kills"]), with_reserve, since)
                since = kill.pop("first_record")
                result["kills"].append(kill)
                print(f"{num_ranks} rank(s): {kill['total_ms']:.0f} ms", flush=True)
    return result


def report(record: dict[str, Any]) -> str:
    """Median, 95th percentile and maximum of every phase, and the first request compared with later ones."""
    rows = []
    for server in record["servers"]:
        for with_reserve in (True, False):
            kills = [kill for kill in server["kills"] if kill["with_reserve"] == with_reserve]
            columns: dict[str, list[float]] = {phase: [kill["phases_ms"][phase] for kill in kills] for phase in PHASES}
            columns["total"] = [kill["total_ms"] for kill in kills]
            columns["longest gap of a stream"] = [gap for kill in kills for gap in kill["longest_gap_ms"]]
            for name, values in columns.items():
                reserve = "yes" if with_reserve else "no"
                figures = [f"{percentile(values, 0.5):.0f}", f"{percentile(values, 0.95):.0f}", f"{max(values):.0f}"]
                rows.append([str(server["ranks"]), reserve, name, *figures])
    firsts = [
        [
            str(server["ranks"]),
            f"{server['first_requests_ms'][0]:.1f}",
            f"{percentile(server['first_requests_ms'][9:], 0.5):.1f}",
            f"{max(server['first_requests_ms'][9:]):.1f}",
        ]
        for server in record["servers"]
    ]
    return (
        f"{record['started']}, {record['machine']['vendor']}, {record['machine']['num_cores']} cores, "
        f"`{record['command']}`, {record['revision']}\n\n"
        "From a rank's death to the next token of its streams, milliseconds:\n\n"
        + markdown(["ranks", "reserve", "phase", "p50", "p95", "max"], rows)
        + "\nThe first request after ready, and the tenth to the last, milliseconds:\n\n"
        + markdown(["ranks", "first", "later p50", "later max"], firsts)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=10, help="kills with and without a standby group, for each number of ranks (10)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=peers.ROOT / "bench" / "runs")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        **heading(),
        "machine": in_own_process("limits.py")["machine"],
        "servers": [measure(num_ranks, options.kills) for num_ranks in options.ranks],
    }
    keep(record, record["machine"], "death", report(record), options.out)


if __name__ == "__main__":
    main()
