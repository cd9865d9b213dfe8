"""Compares Penstock with llama.cpp on each API that AIPerf speaks, with `penstock bench`.

The APIs are chat, Responses, Messages and TGI's. Both servers run the same weights in bf16, and one of them is loaded
at a time. A server without a route is left out there, and the result has its answer. AIPerf needs more processor time
than the load generator of the other programs here: on the servers' own machine, compare only what it measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
from compare import Server, free_port, llama_server, penstock_server, running
from figure import endpoints, table_of
from penstock_server.bench.endpoint import BenchError, model_of, try_out
from result import ROOT, from_root, heading, keep, machine, option_parser, title
from table import markdown

ENDPOINTS = ("chat", "responses", "messages", "generate")
INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
SAME_WORK = {"ignore_eos": True}  # the form that `penstock bench` sends
OWN_AIPERF = ROOT / ".venv" / "aiperf" / "bin"  # `make .make/aiperf`
DETAILS = "profile_export_aiperf.json"
LEFT_OUT = {"input_config", "run_info", "warmup_metrics"}  # keys of AIPerf's summary: its settings and the warm-up


def lacking(url: str, endpoint: str) -> str | None:
    """Why a server cannot be measured on a route; None: it can."""
    try:
        try_out(url, endpoint, model_of(url), SAME_WORK)
    except BenchError as error:
        return str(error).partition("; try ")[0].replace(url, "").strip()
    return None


def measure(server: Server, urls: Sequence[str], endpoint: str, options: Mapping[str, int]) -> list[dict[str, Any]]:
    """Runs `penstock bench` on these servers; for each, its point and AIPerf's own summary."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        output = Path(scratch) / "result"
        flags = {"--url": urls[0], "--endpoint": endpoint, "--output": str(output)}
        flags |= {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
        flags |= {"--against": urls[1]} if len(urls) > 1 else {}
        binary = server.command(0)[0]
        environment = {**os.environ, **server.environment, "PATH": f"{OWN_AIPERF}{os.pathsep}{os.environ['PATH']}"}
        command = [binary, "bench", *(f"{name}={value}" for name, value in flags.items())]
        subprocess.run(command, env=environment, check=True)
        found = json.loads((output / "result.json").read_text())["servers"]
        measured = []
        for number, one in enumerate(found, 1):
            (point,) = one["points"]
            (details,) = (output / f"server-{number}").glob(f"*/{DETAILS}")
            summary = json.loads(details.read_text())
            measured.append({**point, "aiperf": {name: summary[name] for name in summary if name not in LEFT_OUT}})
        return measured


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--only", nargs="+", choices=("penstock", "llama.cpp"), default=["penstock", "llama.cpp"])
    parser.add_argument("--endpoints", nargs="+", choices=ENDPOINTS, default=list(ENDPOINTS))
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests-per-stream", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat with few requests, as a smoke test")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    requests = 1 if options.quick else options.requests_per_stream
    load = {
        "concurrency": options.concurrency,
        "requests_per_stream": requests,
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    ours = penstock_server(["--standby", "off"])
    servers = {
        "penstock": lambda: replace(ours, settled=""),
        "llama.cpp": lambda: llama_server("llama.cpp", peers.bf16_gguf(), options.concurrency, []),
    }
    repeats: list[dict[str, Any]] = []
    missing: dict[str, dict[str, str]] = {}
    record = {**heading(), "machine": machine(), "load": load, "servers": {}, "missing": missing, "repeats": repeats}
    if "llama.cpp" in options.only:
        record["peer_source"] = peers.LLAMA_SOURCE
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in options.only:
            server, port = servers[name](), free_port()
            stack.enter_context(running(server, port))
            urls[name] = f"http://127.0.0.1:{port}"
            record["servers"][name] = {"command": from_root(server.command(0))}
        for endpoint in options.endpoints:
            reasons = {name: lacking(url, endpoint) for name, url in urls.items()}
            missing[endpoint] = {name: reason for name, reason in reasons.items() if reason}
        for repeat in range(1 if options.quick else options.repeats):
            measured: dict[str, Any] = {}
            for place, endpoint in enumerate(options.endpoints):
                names = [name for name in urls if name not in missing[endpoint]]
                if names:
                    # Another seed each time: chat routes make the same prompt of a text, and Penstock caches it.
                    seed = 1_000 * (repeat * len(options.endpoints) + place)
                    points = measure(ours, [urls[name] for name in names], endpoint, {**load, "seed": seed})
                    measured[endpoint] = dict(zip(names, points, strict=True))
            repeats.append(measured)
    keep(record, "endpoints", report(record), options.out)


def report(record: Mapping[str, Any]) -> str:
    """The figures, and what was not measured and why."""
    rows = [[endpoint, name, reason] for endpoint, names in record["missing"].items() for name, reason in names.items()]
    left_out = f"\nNot measured:\n\n{markdown(['route', 'server', 'its answer'], rows)}" if rows else ""
    return title(record) + table_of(endpoints(record)) + left_out


if __name__ == "__main__":
    main()
