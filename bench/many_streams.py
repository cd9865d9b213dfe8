"""Measures `penstock route` with 20,000 concurrent streams over mock replicas: CPU per token, memory per stream.

Each connection has a request for two choices, and so two streams: a process may often open no more than 20,000 files.
The cost of a token is the difference between long and short answers. Clients, router and replicas share the cores;
steps are so slow that none of them waits for processor time.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import peers
from compare import free_port, running
from load import LoadError, ask, openai_dialect, percentile, prompt_of
from process import clock_s_of, memory_of
from result import heading, keep, machine, option_parser, title
from routing import COST, NUM_REPLICAS, mock_replicas, routers
from table import markdown

NUM_CLIENTS, CHOICES, PROMPT_TOKENS = 4, 2, 32
SHORT_TOKENS, LONG_TOKENS = 24, 72
STEP_S = 1.0
CONNECTING = 64  # connections that a client opens at a time


async def stream(port: int, num_connections: int, num_tokens: int) -> dict[str, int]:
    """One client: the tokens that arrived, and how many requests failed."""
    words = peers.prompt_words()
    dialect = openai_dialect("/v1/completions", lambda prompt, _: {"model": "mock", "prompt": prompt, "n": CHOICES})
    prompt = prompt_of(words, PROMPT_TOKENS, random.Random(0))

    async def one(index: int) -> int:
        await asyncio.sleep(index / CONNECTING * 0.05)
        try:
            exchange = await ask(port, dialect, prompt, num_tokens)
            return dialect.counts(json.loads(exchange.last))[1]
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    counts = await asyncio.gather(*(one(index) for index in range(num_connections)))
    return {"num_tokens": sum(counts), "num_errors": sum(count != CHOICES * num_tokens for count in counts)}


def resident_bytes(pid: int) -> int:
    return sum(row["rss_bytes"] for row in memory_of(pid))


def run(port: int, pid: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    """All streams at once: the router's CPU seconds, its most resident bytes, tokens and errors."""
    num_connections = num_streams // CHOICES // NUM_CLIENTS
    client = [sys.executable, __file__, "--client", str(port), str(num_connections), str(num_tokens)]
    before_s, most_bytes, ended = clock_s_of(pid), 0, threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not ended.wait(0.5):
            most_bytes = max(most_bytes, resident_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        clients = [subprocess.Popen(client, stdout=subprocess.PIPE, text=True) for _ in range(NUM_CLIENTS)]
        answers = [json.loads(client.communicate()[0]) for client in clients]
    finally:
        ended.set()
        watcher.join()
    totals = {key: sum(answer[key] for answer in answers) for key in ("num_tokens", "num_errors")}
    return {"cpu_s": clock_s_of(pid) - before_s, "most_bytes": most_bytes, **totals}


def measure(port: int, pid: int, num_streams: int) -> dict[str, Any]:
    """Short and long answers on every stream."""
    idle_bytes = resident_bytes(pid)
    short, long = (run(port, pid, num_streams, num_tokens) for num_tokens in (SHORT_TOKENS, LONG_TOKENS))
    cpu_s = (long["cpu_s"] - short["cpu_s"]) / (num_streams * (LONG_TOKENS - SHORT_TOKENS))
    return {
        "streams": num_streams,
        "short": short,
        "long": long,
        "cpu_us_per_token": cpu_s * 1e6,
        "cpu_us_per_stream": (short["cpu_s"] / num_streams - SHORT_TOKENS * cpu_s) * 1e6,
        "bytes_per_stream": (max(short["most_bytes"], long["most_bytes"]) - idle_bytes) / num_streams,
        "num_errors": short["num_errors"] + long["num_errors"],
    }


def report(record: dict[str, Any]) -> str:
    """A row for each number of streams: medians."""
    rows = []
    for cells in zip(*record["repeats"], strict=True):

        def median(key: str, cells: Sequence[dict[str, Any]] = cells) -> float:
            return percentile([cell[key] for cell in cells], 0.5)

        rows.append(
            [
                str(cells[0]["streams"]),
                f"{median('cpu_us_per_token'):.1f}",
                f"{median('cpu_us_per_stream'):.0f}",
                f"{median('bytes_per_stream') / 1024:.1f}",
                str(sum(cell["num_errors"] for cell in cells)),
            ]
        )
    columns = ["streams", "CPU µs a token", "CPU µs a stream", "KiB a stream", "errors"]
    return title(record) + markdown(columns, rows)


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[2000, 20_000])
    parser.add_argument("--client", type=int, nargs=3, metavar=("PORT", "CONNECTIONS", "TOKENS"), help="only send")
    options = parser.parse_args()
    if options.client:
        print(json.dumps(asyncio.run(stream(*options.client))))
        return
    words = peers.prompt_words()
    most = max(options.streams)
    record: dict[str, Any] = {**heading(), "machine": machine(), "step_s": STEP_S, "repeats": []}
    cost = dict.fromkeys(COST, 0) | {"STEP_MICROSECONDS": int(STEP_S * 1e6)}
    with mock_replicas(words, cost, num_blocks=1 << 16, max_batch=2 * most // NUM_REPLICAS) as ports:
        router, port = routers(*ports, max_requests=most)["penstock"], free_port()
        with running(router, port) as started:
            run(port, started.pid, most // 4, 4)
            for repeat in range(options.repeats):
                print(f"repeat {repeat + 1}", flush=True)
                record["repeats"].append([measure(port, started.pid, num) for num in options.streams])
                print(record["repeats"][-1], flush=True)
    keep(record, "many-streams", report(record), options.out)


if __name__ == "__main__":
    try:
        main()
    except LoadError as error:
        sys.exit(f"error: {error}")
