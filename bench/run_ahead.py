"""Measures run-ahead: the worker's idle time per step with one and with two steps in flight.

Two servers, with `--max-steps-in-flight 1` and with the default, run at the same time and are loaded alternately. The
idle time is the worker's own measurement, from the difference of its histogram over each load.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import peers
from compare import free_port, metrics_of, penstock_server, running
from load import PENSTOCK, Load, percentile, run
from result import heading, keep, machine, option_parser, title
from table import markdown

DEPTHS = (1, 2)  # the default is 2
PARTS = ("idle", "prepare", "forward", "sample")
METHOD = '{method="decode"}'
Row = dict[str, Any]


def measure(port: int, load: Load, words: Sequence[str], seed: str) -> Row:
    """Mean seconds per decode step, by part of the worker's time, and tokens per second."""
    before = metrics_of(port)
    result = run(port, PENSTOCK, load, words, seed)
    after = metrics_of(port)

    def added(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    steps = added(f"penstock_step_worker_idle_seconds_count{METHOD}")
    parts = {part: added(f"penstock_step_worker_{part}_seconds_sum{METHOD}") / steps for part in PARTS}
    return {
        "steps": steps,
        "tokens_per_s": result.tokens_per_s,
        **{f"{part}_s": value for part, value in parts.items()},
    }


def report(record: dict[str, Any]) -> str:
    rows = []
    for streams, repeats in record["loads"].items():
        for depth in map(str, DEPTHS):

            def median(key: str, depth: str = depth, repeats: Sequence[Row] = repeats) -> float:
                return percentile([repeat[depth][key] for repeat in repeats], 0.5)

            idle, forward = median("idle_s"), median("forward_s")
            cells = [f"{idle * 1e6:.0f}", f"{forward * 1e6:.0f}", f"{100 * idle / (idle + forward):.1f} %"]
            rows.append([streams, depth, *cells, f"{median('tokens_per_s'):.1f}"])
    table = markdown(
        ["streams", "steps in flight", "idle µs a step", "model µs a step", "idle share", "tokens/s"], rows
    )
    return f"{title(record)}Decode steps, medians of the repeats:\n\n{table}"


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    words = peers.prompt_words()
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "loads": {str(streams): [] for streams in options.streams},
    }
    with contextlib.ExitStack() as servers:
        ports = {depth: free_port() for depth in DEPTHS}
        for depth, port in ports.items():
            flags = ["--max-steps-in-flight", str(depth), "--max-batch-total-tokens", "40000"]
            servers.enter_context(running(penstock_server(flags), port))
            run(port, PENSTOCK, Load("warm-up", max(options.streams), 1, 16, 16), words, "warm-up")
        for repeat, streams in itertools.product(range(options.repeats), options.streams):
            load, row = Load(f"{streams}", streams, 1, 16, options.tokens), {}
            for depth in DEPTHS[:: 1 if repeat % 2 else -1]:
                row[str(depth)] = measure(ports[depth], load, words, str(repeat))
            record["loads"][str(streams)].append(row)
            idle = ", ".join(f"{depth}: {row[str(depth)]['idle_s'] * 1e6:.0f} µs" for depth in DEPTHS)
            print(f"  {streams:3d} streams, idle time per step by steps in flight: {idle}", flush=True)
    keep(record, "run-ahead", report(record), options.out)


if __name__ == "__main__":
    main()
