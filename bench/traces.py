"""Measures the cost of traces: two servers with the real model, loaded alternately; one of them exports its spans.

The collector is OpenTelemetry's gRPC method in a process of its own, which takes the spans unread. Throughput is noisy
on shared machines. The processor time of the router process per token is steadier, and covers the export too: it is
read after the last spans of a load have left.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import peers
from compare import free_port, metrics_of, penstock_server, running, stream_load
from figure import table_of, traces
from load import PENSTOCK, run
from process import clock_s_of, cpu_s_of
from result import heading, keep, machine, option_parser, title

MAX_TOKENS = 80_000  # tokens in the KV cache, so that neither server takes the memory of the other
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SETTLE_S = 3  # spans leave a second after their requests
MODES = ("off", "on")


def collect(port: int) -> None:
    """Serves as a trace collector until it is killed."""
    import grpc

    method = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")  # no field is set: all were taken
    service = grpc.server(ThreadPoolExecutor(1))
    name = EXPORT.rsplit("/", 2)[1]
    service.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": method})])
    service.add_insecure_port(f"127.0.0.1:{port}")
    service.start()
    service.wait_for_termination()


@contextlib.contextmanager
def collector() -> Iterator[int]:
    """The port of a collector in a process of its own."""
    port = free_port()
    process = subprocess.Popen([sys.executable, __file__, "--collect", str(port)])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def measure(port: int, pid: int, streams: int, rounds: int, words: Sequence[str], seed: str) -> dict[str, float]:
    """One load on one server. Processor seconds: `router_s` of the router's process, `all_s` of all processes."""
    exported = metrics_of(port).get("penstock_spans_exported", 0.0)
    router_s, all_s = clock_s_of(pid), cpu_s_of(pid)
    result = run(port, PENSTOCK, stream_load(streams, rounds), words, seed)
    time.sleep(SETTLE_S)
    router_s, all_s = clock_s_of(pid) - router_s, cpu_s_of(pid) - all_s
    after = metrics_of(port)
    return {
        "tokens_per_s": result.tokens_per_s,
        "num_tokens": result.num_tokens,
        "num_requests": len(result.samples),
        "router_s": router_s,
        "all_s": all_s,
        "spans_exported": after.get("penstock_spans_exported", 0.0) - exported,
        "spans_lost": sum(value for name, value in after.items() if name.startswith("penstock_spans_lost")),
    }


def main() -> None:
    parser = option_parser(__doc__, num_repeats=9)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream in a load")
    parser.add_argument("--quick", action="store_true", help="two short repeats, as a smoke test")
    parser.add_argument("--collect", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        collect(options.collect)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every process is stopped

    words = peers.prompt_words()
    rounds = 1 if options.quick else options.rounds
    repeats: list[dict[str, Any]] = []
    record = {
        **heading(),
        "machine": machine(),
        "load": {"streams": options.streams, "rounds": rounds},
        "repeats": repeats,
    }
    flags = ["--max-batch-total-tokens", str(MAX_TOKENS), "--standby", "off"]
    with contextlib.ExitStack() as stack:
        traced = ["--otlp-endpoint", f"http://127.0.0.1:{stack.enter_context(collector())}"]
        servers = {}
        for mode, extra in zip(MODES, ([], traced), strict=True):
            server, port = replace(penstock_server([*flags, *extra]), settled=""), free_port()
            servers[mode] = (port, stack.enter_context(running(server, port)).pid)
            measure(*servers[mode], options.streams, 1, words, "warm-up")
        for repeat in range(2 if options.quick else options.repeats):
            measured = {}
            for mode in MODES if repeat % 2 == 0 else MODES[::-1]:  # neither is always first
                measured[mode] = measure(*servers[mode], options.streams, rounds, words, str(repeat))
            if not measured["on"]["spans_exported"] or measured["on"]["spans_lost"]:
                raise SystemExit(f"error: the collector did not get all spans: {measured['on']}")
            repeats.append(measured)
            print("  " + ", ".join(f"{mode} {measured[mode]['tokens_per_s']:.0f} tok/s" for mode in MODES), flush=True)
    keep(record, "traces", title(record) + table_of(traces(record)), options.out)


if __name__ == "__main__":
    main()
