"""Measures the time to the first token of a prompt that was served before: computed again, or with a prefix that comes
back from host memory (`--kv-offload-gib`) or from a file (`--kv-offload-disk-gib`), or that is still in the KV pool.

The pool holds two of the prompts, so that of twelve in turn none is left when it comes again. "pool" has room for all.
"""

from __future__ import annotations

import functools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import peers
from compare import (
    Measure,
    Server,
    exit_on_errors,
    free_port,
    measure_all,
    metrics_of,
    penstock_server,
    running,
)
from figure import offload, table_of
from result import from_root, heading, keep, machine, option_parser, title

NUM_PROMPTS, POOL_PROMPTS = 12, 2


def servers_of(prompt_tokens: int, folder: str) -> dict[str, Server]:
    pool = ["--max-batch-total-tokens", str(POOL_PROMPTS * prompt_tokens), "--standby", "off"]
    flags = {
        "computed": pool,
        "memory": [*pool, "--kv-offload-gib", "2"],
        "file": [*pool, "--kv-offload-disk-gib", "2", "--kv-offload-folder", folder],
        "pool": ["--max-batch-total-tokens", str((NUM_PROMPTS + POOL_PROMPTS) * prompt_tokens), "--standby", "off"],
    }
    return {name: replace(penstock_server(extra), settled="") for name, extra in flags.items()}


def first_token_s(port: int, words: Sequence[str], seed: str, prompt_tokens: int) -> float:
    """Time to the first token of a prompt of `prompt_tokens` tokens. A seed always gives the same prompt."""
    text = " ".join(random.Random(seed).choices(words, k=prompt_tokens))
    parameters = {"max_new_tokens": 1, "truncate": prompt_tokens - 2}
    body = json.dumps({"inputs": text, "parameters": parameters}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"content-type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        response.read()
    return time.perf_counter() - begin


def measure(server: Server, words: Sequence[str], prompt_tokens: int, seed: str) -> dict[str, Any]:
    port = free_port()
    with running(server, port):
        first, second = (
            [first_token_s(port, words, f"{seed}/{number}", prompt_tokens) for number in range(NUM_PROMPTS)]
            for _ in range(2)
        )
        metrics = metrics_of(port)
    hit = metrics["penstock_prefix_hit_tokens"]
    print(
        f"  {statistics.median(first):.3f} s, then {statistics.median(second):.3f} s; {hit:.0f} tokens hit", flush=True
    )
    return {"first_s": first, "second_s": second, "hit_tokens": hit}


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped
    words = peers.prompt_words()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        servers = servers_of(options.prompt_tokens, folder)
        record: dict[str, Any] = {
            **heading(),
            "machine": machine(),
            "prompt_tokens": options.prompt_tokens,
            "servers": {name: {"command": from_root(server.command(0))} for name, server in servers.items()},
            "repeats": [],
        }
        for repeat in range(options.repeats):
            measures: dict[str, Measure] = {
                name: functools.partial(measure, server, words, options.prompt_tokens)
                for name, server in list(servers.items())[:: -1 if repeat % 2 else 1]
            }
            record["repeats"].append(measure_all(measures, repeat))
    keep(record, "offload", title(record) + table_of(offload(record)), options.out)
    exit_on_errors(record)


if __name__ == "__main__":
    main()
