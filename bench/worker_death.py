"""Measures recovery: how long streams pause when a worker is killed, by phase, and whether first requests are slower.

The real server runs the embedded model. While streams run, a rank is killed (SIGKILL). The server's log gives the
phases of the pause; each client records its longest gap. Each kill is measured with and without a standby group.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from load import percentile
from result import ROOT, heading, keep, machine, option_parser, title
from table import markdown

sys.path.insert(0, str(ROOT / "integration-tests"))

from binary import Server, logged, start
from client import connect, send
from fault.probe import wait_until

STREAMS, TOKENS = 4, 400
PHASES = ("notice", "backoff", "stop", "spawn", "connect", "load", "warm_up", "first_token")
TIMEOUT_S = 300.0
FIRST_REQUESTS = 20


@contextmanager
def serving(num_ranks: int) -> Iterator[Server]:
    """Yields Penstock with the embedded model once it is ready, and stops it at the end."""
    server = start("--num-shard", str(num_ranks), env={"LOG_LEVEL": "debug"})
    try:
        yield server
    finally:
        server.stop()


def wait_for(server: Server, message: str, since: int) -> None:
    """Waits for a log line that contains `message`, after the first `since` lines."""
    wait_until(lambda: any(message in line for line in server.lines[since:]), message)


def stream(server: Server, prompt: str, arrivals: list[float]) -> None:
    """Runs one greedy stream and appends the arrival time of each event."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS}}
    connection, response = send(server, "/generate_stream", body)
    for line in response:
        if line.startswith(b"data:"):
            arrivals.append(time.perf_counter())
    connection.close()


def measure_kill(server: Server, index: int, with_reserve: bool, since: int) -> dict[str, Any]:
    """Kill a rank under running streams. `since`: number of log lines before the serving group started."""
    wait_for(server, "the standby group is ready", since)
    if not with_reserve:
        for pid in server.worker_groups()[1]:
            os.kill(pid, signal.SIGKILL)
        wait_for(server, "the standby group failed", since)
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    threads = [
        threading.Thread(target=stream, args=(server, f"Story {index}.{place}: once upon a time", arrivals[place]))
        for place in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(times) > 8 for times in arrivals), "the streams to begin")
    before = len(server.lines)
    workers = server.worker_groups()[0]
    os.kill(workers[index % len(workers)], signal.SIGKILL)
    wait_for(server, "the model workers have recovered", before)
    for thread in threads:
        thread.join()
    found = logged(server, "restart phase ", "milliseconds", before)
    return {
        "with_reserve": with_reserve,
        "first_line": before,
        "phases_ms": {phase: found[phase] for phase in PHASES},
        "total_ms": logged(server, "the model workers have recovered", "milliseconds", before)[""],
        "longest_gap_ms": [max(b - a for a, b in itertools.pairwise(times)) * 1000 for times in arrivals],
    }


def first_requests(server: Server) -> list[float]:
    """Milliseconds of each of the first requests after ready, sent one after the other, eight tokens each."""
    connection = connect(server, TIMEOUT_S)
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
        result: dict[str, Any] = {"ranks": num_ranks, "start_s": logged(server, "phase ")}
        result["first_requests_ms"] = first_requests(server)
        result["kills"] = []
        since = 0
        for with_reserve in (True, False):
            for _ in range(kills):
                kill = measure_kill(server, len(result["kills"]), with_reserve, since)
                since = kill.pop("first_line")
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
        f"{title(record)}From a rank's death to the next token of its streams, milliseconds:\n\n"
        + markdown(["ranks", "reserve", "phase", "p50", "p95", "max"], rows)
        + "\nThe first request after ready, and the tenth to the last, milliseconds:\n\n"
        + markdown(["ranks", "first", "later p50", "later max"], firsts)
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--kills", type=int, default=10, help="kills with and without a standby group, for each number of ranks (10)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "servers": [measure(num_ranks, options.kills) for num_ranks in options.ranks],
    }
    keep(record, "death", report(record), options.out)


if __name__ == "__main__":
    main()
