"""Compares two ranks with one on the same cores, and times one gather between two ranks. Both servers run at the same
time and are loaded alternately."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from typing import Any

import peers
from compare import WEIGHTS, free_port, penstock_server, running, stream_load
from figure import ranks, table_of
from gathers import gather_times
from load import PENSTOCK, run
from result import heading, keep, machine, option_parser, title

NUM_RANKS = (1, 2)


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    words = peers.prompt_words()
    repeats: list[dict[str, Any]] = [{} for _ in range(options.repeats)]
    gathers = [gather_times() for _ in range(options.repeats)]
    record: dict[str, Any] = {**heading(), "machine": machine(), "repeats": repeats, "gathers": gathers}
    for weights in options.weights:
        with contextlib.ExitStack() as servers:
            ports = {num: free_port() for num in NUM_RANKS}
            for num, port in ports.items():
                flags = ["--num-shard", str(num), "--max-batch-total-tokens", "40000"]
                servers.enter_context(running(penstock_server(flags, dequantize=WEIGHTS[weights]), port))
                run(port, PENSTOCK, stream_load(max(options.streams), 1), words, "warm-up")
            for repeat, streams in itertools.product(range(options.repeats), options.streams):
                rates = repeats[repeat].setdefault(weights, {}).setdefault(str(streams), {})
                for num in NUM_RANKS[:: -1 if repeat % 2 else 1]:
                    result = run(ports[num], PENSTOCK, stream_load(streams), words, str(repeat))
                    rates[str(num)] = result.tokens_per_s
                print(f"  {weights}, {streams} streams: two ranks {rates['2'] / rates['1']:.2f} of one", flush=True)
    keep(record, "ranks", title(record) + table_of(ranks(record)), options.out)


if __name__ == "__main__":
    main()
