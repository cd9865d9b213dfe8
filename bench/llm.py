"""Compares the throughput of `penstock.LLM` with that of a server that many clients stream from.

Both run at the same time and are loaded alternately with as many prompts of the same lengths. A first pass loads the
server with several numbers of streams. Every repeat then loads `LLM` and, right before or after it, the server with the
best number: the best of several noisy figures of one repeat would be too high.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import peers
from compare import INPUT_TOKENS, OUTPUT_TOKENS, free_port, penstock_server, running
from figure import llm, table_of
from load import PENSTOCK, Load, prompt_of, run
from penstock import LLM, SamplingParams
from result import heading, keep, machine, option_parser, title

MAX_TOKENS = 80_000  # tokens in the KV cache, so that neither server takes the memory of the other


def generated_per_s(model: LLM, words: Sequence[str], num_prompts: int, seed: str) -> float:
    """Tokens per second of one call."""
    source = random.Random(seed)
    prompts = [prompt_of(words, INPUT_TOKENS, source) for _ in range(num_prompts)]
    start = time.perf_counter()
    results = model.generate(prompts, SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0), use_tqdm=False)
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - start)


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 128, 256])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    words, port = peers.prompt_words(), free_port()
    flags = ["--max-batch-total-tokens", str(MAX_TOKENS), "--max-concurrent-requests", str(2 * max(options.streams))]
    repeats: list[dict[str, Any]] = []
    settings = {"max_batch_total_tokens": MAX_TOKENS, "standby": "off", "dequantize": True}
    server = replace(penstock_server([*flags, "--standby", "off"]), settled="")
    with running(server, port), LLM(**settings) as model:

        def served(streams: int, seed: str) -> float:
            rounds = max(1, options.prompts // streams)
            load = Load(f"{streams} streams", streams, rounds, INPUT_TOKENS, OUTPUT_TOKENS)
            return run(port, PENSTOCK, load, words, seed).tokens_per_s

        def generated(seed: str) -> float:
            return generated_per_s(model, words, options.prompts, f"LLM {seed}")

        generated("warm-up")
        served(options.streams[0], "warm-up")
        scan = {str(streams): served(streams, "scan") for streams in options.streams}
        best = max(scan, key=scan.__getitem__)
        print(f"  server {scan}", flush=True)
        for repeat in range(options.repeats):
            rates: dict[str, Any] = {}
            for who in ("server", "LLM")[:: -1 if repeat % 2 else 1]:
                rates[who] = generated(str(repeat)) if who == "LLM" else {best: served(int(best), str(repeat))}
            print(f"  {rates}", flush=True)
            repeats.append(rates)
    record = {**heading(), "machine": machine(), "prompts": options.prompts, "scan": scan, "repeats": repeats}
    keep(record, "llm", title(record) + table_of(llm(record)), options.out)


if __name__ == "__main__":
    main()
