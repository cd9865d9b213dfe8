"""Measures the router alone: the real binary with a mock worker (bench/worker).

Reports the CPU time of the penstock process (from /proc) per request and per token, for plain and chat streams, and the
delay of other streams when a prompt of 32,000 tokens arrives.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
from compare import Server, embedded_folder, free_port, penstock_server, running
from load import PENSTOCK, Dialect, Load, openai_dialect, percentile, run
from load import _run as run_async
from result import ROOT, heading, keep, machine, option_parser, title
from table import markdown
from tokenizers import Tokenizer

CHAT = openai_dialect("/v1/chat/completions", lambda prompt, _: {"messages": [{"role": "user", "content": prompt}]})
DIALECTS = {"generate": PENSTOCK, "chat": CHAT}
SHORT_TOKENS, LONG_TOKENS = 2, 130
PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 32_000
STEP_MICROSECONDS = 2000


def build_worker() -> Path:
    """The release build of the mock worker."""
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--package", "penstock-bench-worker"]
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / "target" / "release" / "penstock-bench-worker"


# Replaces penstock_server.process.fork_server and forks the mock worker.
FORK_SERVER = """
import os, sys
from penstock_server.process.fork_server import ForkServer

def run(config, _):
    flags = ["--socket", str(config.endpoint.path), "--rank", str(config.rank), "--world-size", str(config.world_size)]
    name = open("/proc/self/comm").read().rstrip()
    os.execv(sys.argv[1], [sys.argv[1], *flags, "--name", name])

ForkServer(run, lambda _: None).serve()
"""


def scripted(server: Server, worker: Path, folder: Path, token_ids: Sequence[int]) -> Server:
    """The same server with the mock worker."""
    environment = {**server.environment, **script(worker, folder, token_ids), "LOG_LEVEL": "warn"}
    return Server("penstock", "none", server.command, PENSTOCK, environment)


def script(worker: Path, folder: Path, token_ids: Sequence[int]) -> dict[str, str]:
    """Makes, in `folder`, a Python that forks the mock worker. Returns the environment of a server that uses it."""
    python = folder / "python"
    interpreter = shlex.quote(sys.executable)
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = penstock_server.process.fork_server ]; then\n'
        f"exec {interpreter} -c {shlex.quote(FORK_SERVER)} {shlex.quote(str(worker))}\nfi\n"
        f'exec {interpreter} "$@"\n'
    )
    python.chmod(0o755)
    return {
        "PENSTOCK_PYTHON": str(python),
        "SCRIPT_STEP_MICROSECONDS": str(STEP_MICROSECONDS),
        "SCRIPT_TOKEN_IDS": ",".join(map(str, token_ids)),
    }


def word_tokens(words: Sequence[str]) -> list[int]:
    """The first token of each of some words, to answer with."""
    tokenizer = Tokenizer.from_file(str(embedded_folder() / "tokenizer.json"))
    return [tokenizer.encode(f" {word}").ids[0] for word in words[:64]]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, over all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rename(dialect: Dialect, overhead: int) -> Dialect:
    """Subtracts the chat template's tokens from the prompt's."""
    return Dialect(
        dialect.path, dialect.body, lambda last: (dialect.counts(last)[0] - overhead, dialect.counts(last)[1])
    )


def measure_cost(port: int, pid: int, words: Sequence[str], streams: Sequence[int], seed: str) -> list[dict[str, Any]]:
    """One row per dialect and number of streams: CPU per request and per token, from two answer lengths."""
    rows = []
    for (name, dialect), num_streams in itertools.product(DIALECTS.items(), streams):
        if name == "chat":
            dialect = rename(dialect, template_tokens(port, words))
        num_requests = max(2, min(48, 256 // num_streams))
        costs, last = [], None
        for num_tokens in (SHORT_TOKENS, LONG_TOKENS):
            load = Load(f"{name} {num_streams} {num_tokens}", num_streams, num_requests, PROMPT_TOKENS, num_tokens)
            before = cpu_s(pid)
            last = run(port, dialect, load, words, seed)
            costs.append((cpu_s(pid) - before) / (num_streams * num_requests))
        per_token = (costs[1] - costs[0]) / (LONG_TOKENS - SHORT_TOKENS)
        row = {
            "route": name,
            "streams": num_streams,
            "requests": num_streams * num_requests,
            "cpu_us_per_token": per_token * 1e6,
            "cpu_us_per_request": (costs[0] - SHORT_TOKENS * per_token) * 1e6,
            "tokens_per_s_per_core": 1 / per_token if per_token > 0 else None,
            "served_tokens_per_s": last.tokens_per_s,
            "client_cpu_share": last.client_cpu_s / last.wall_s,
        }
        print(
            "  {route:>8} {streams:4d} streams: {cpu_us_per_token:6.1f} µs/token, "
            "{cpu_us_per_request:7.0f} µs/request".format(**row),
            flush=True,
        )
        rows.append(row)
    return rows


def template_tokens(port: int, words: Sequence[str]) -> int:
    """Number of tokens that the chat template adds to a prompt."""
    import urllib.request

    body = json.dumps({"messages": [{"role": "user", "content": f" {words[0]}"}], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return int(json.load(response)["usage"]["prompt_tokens"]) - 1


async def _gaps(port: int, words: Sequence[str], seed: str, with_prompt: bool) -> list[float]:
    """Gaps between the events of 64 streams, with or without long prompts arriving one after the other."""
    others = asyncio.create_task(run_async(port, PENSTOCK, Load("others", 64, 1, 16, 1500), words, seed))
    # A separate process: making such prompts would block the event loop that takes the times.
    sleep = [sys.executable, "-c", "import time; time.sleep(2)"]
    send = [sys.executable, __file__, "--send-long-prompts", str(port), "--seed", seed]
    beside = await asyncio.create_subprocess_exec(*(send if with_prompt else sleep))
    samples = (await others).samples
    if await beside.wait():
        raise SystemExit("error: the long prompts were not answered")
    return [gap for sample in samples for gap in sample.gaps_s]


def measure_delay(port: int, words: Sequence[str], repeats: int) -> dict[str, Any]:
    """Median, 99.9th percentile and maximum gap without and with long prompts, alternating."""
    result: dict[str, Any] = {"without": [], "with": []}
    for repeat in range(repeats):
        for name in ("without", "with"):
            gaps = asyncio.run(_gaps(port, words, f"{name}{repeat}", name == "with"))
            result[name].append(
                {
                    "num": len(gaps),
                    "p50_us": percentile(gaps, 0.5) * 1e6,
                    "p999_us": percentile(gaps, 0.999) * 1e6,
                    "max_us": max(gaps) * 1e6,
                }
            )
            print(f"  {name} a long prompt: {result[name][-1]}", flush=True)
    return result


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument(
        "--send-long-prompts", type=int, metavar="PORT", help="only send long prompts to a running server"
    )
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()

    words = peers.prompt_words()
    if options.send_long_prompts:
        run(options.send_long_prompts, PENSTOCK, Load("long", 1, 3, LONG_PROMPT_TOKENS, 2), words, options.seed)
        return
    most = max(options.streams)
    flags = [
        "--max-concurrent-requests",
        str(most + 8),
        "--max-batch-size",
        str(most + 8),
        "--max-batch-prefill-tokens",
        "4096",
        "--max-total-tokens",
        "40000",
    ]
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "step_microseconds": STEP_MICROSECONDS,
        "costs": [],
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        server = scripted(penstock_server(flags), build_worker(), Path(scratch), word_tokens(words))
        port = free_port()
        with running(server, port) as started:
            run(port, PENSTOCK, Load("warm-up", most, 1, PROMPT_TOKENS, 16), words, "warm-up")
            for repeat in range(options.repeats):
                print(f"repeat {repeat + 1}", flush=True)
                record["costs"].append(measure_cost(port, started.pid, words, options.streams, str(repeat)))
            record["delay"] = measure_delay(port, words, options.repeats)
    keep(record, "router", report(record), options.out)


def report(record: dict[str, Any]) -> str:
    """Medians over the repeats."""
    rows = []
    for cells in zip(*record["costs"], strict=True):

        def median(key: str, cells: Sequence[dict[str, Any]] = cells) -> float:
            return percentile([cell[key] for cell in cells if cell[key] is not None], 0.5)

        rows.append(
            [
                cells[0]["route"],
                str(cells[0]["streams"]),
                f"{median('cpu_us_per_token'):.1f}",
                f"{median('cpu_us_per_request'):.0f}",
                f"{median('tokens_per_s_per_core'):.0f}",
            ]
        )
    table = markdown(["route", "streams", "CPU µs a token", "CPU µs a request", "tokens/s a core"], rows)
    delay = record["delay"]
    delays = [
        [
            name,
            *(f"{percentile([one[key] for one in delay[name]], 0.5):.0f}" for key in ("p50_us", "p999_us", "max_us")),
        ]
        for name in ("without", "with")
    ]
    return (
        f"{title(record)}{table}\n"
        f"Gaps of 64 streams at steps of {record['step_microseconds']} µs, without and with prompts of "
        f"{LONG_PROMPT_TOKENS} tokens:\n\n" + markdown(["long prompts", "p50 µs", "p99.9 µs", "max µs"], delays)
    )


if __name__ == "__main__":
    main()
