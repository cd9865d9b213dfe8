"""Measures how throughput shrinks when other processes keep the cores busy, relative to the fair share of processor
time: with `k` busy threads beside the server's `n` threads on `n` cores, n / (n + k).

All loads of one repeat alternate on one server, each after the same load without neighbours. Every load has prompts of
its own, which the prefix cache does not have. The neighbours compute without touching memory, and they and the server
are in one session, within which Linux shares time between threads.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import peers
from compare import WEIGHTS, free_port, penstock_server, running, stream_load
from figure import contention, table_of
from load import PENSTOCK, run
from process import cpu_s_of
from result import heading, keep, machine, option_parser, title

NUM_NEIGHBOURS = (0, 1, 2)
# Ends with its parent, even if that was killed.
BUSY = """
import os
print(flush=True)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_neighbours(num: int) -> Iterator[list[int]]:
    """Yields the ids of processes that are busy."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num):
            command = [sys.executable, "-c", BUSY]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measure(port: int, pid: int, num_streams: int, num_neighbours: int, words: Sequence[str], seed: str) -> Any:
    # The scheduler learns how long steps take, and computes prompts in smaller pieces where they are slow: no cell may
    # begin with what it learned beside the neighbours of the last one.
    run(port, PENSTOCK, stream_load(num_streams), words, f"{seed}/warm-up")
    with busy_neighbours(num_neighbours) as neighbours:
        before = [cpu_s_of(each) for each in (pid, *neighbours)]
        result = run(port, PENSTOCK, stream_load(num_streams), words, seed)
        server_s, *neighbours_s = (
            cpu_s_of(each) - start for each, start in zip((pid, *neighbours), before, strict=True)
        )
    return {
        "tokens_per_s": result.tokens_per_s,
        "wall_s": result.wall_s,
        "server_cpu_s": server_s,
        "neighbours_cpu_s": neighbours_s,
        "client_cpu_s": result.client_cpu_s,
    }


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every process is stopped

    words = peers.prompt_words()
    repeats: list[dict[str, Any]] = [{} for _ in range(options.repeats)]
    record: dict[str, Any] = {**heading(), "machine": machine(), "prompts": "of each cell", "repeats": repeats}
    for weights in options.weights:
        port = free_port()
        with running(penstock_server([], dequantize=WEIGHTS[weights]), port, in_own_session=False) as server:
            run(port, PENSTOCK, stream_load(max(options.streams), 1), words, "warm-up")
            for repeat, streams in itertools.product(range(options.repeats), options.streams):
                cells = repeats[repeat].setdefault(weights, {}).setdefault(str(streams), {})
                for num in NUM_NEIGHBOURS[:: -1 if repeat % 2 else 1]:
                    cell = measure(port, server.pid, streams, num, words, f"{repeat}/{num}")
                    cells[str(num)] = cell
                    print(
                        f"  {weights}, {streams} streams, {num} busy neighbours: {cell['tokens_per_s']:.1f} tokens/s",
                        flush=True,
                    )
    keep(record, "contention", title(record) + table_of(contention(record)), options.out)


if __name__ == "__main__":
    main()
