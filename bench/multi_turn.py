"""Measures the prefix cache: TTFT of growing conversations, and its overhead on prompts without a hit.

Two servers, with and without `--prefix-caching`, run at the same time. Every turn and every random prompt goes to one
and then to the other, in alternating order; each ratio is that of one pair. The other server is idle meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import peers
from compare import Server, free_port, metrics_of, penstock_server, running
from load import PENSTOCK, Load, _ask, percentile, prompt_of, run
from result import heading, keep, machine, option_parser, title
from table import markdown

NUM_CONVERSATIONS = 8
TURN_TOKENS = 250  # a user turn and its answer together
ANSWER_TOKENS = 8
TARGET_HISTORY_TOKENS = 2000
QUERIED, HIT = "penstock_prefix_queried_tokens", "penstock_prefix_hit_tokens"
Row = dict[str, Any]


def server_with(caching: bool) -> Server:
    flags = [
        "--prefix-caching",
        str(caching).lower(),
        "--max-batch-total-tokens",
        "40000",
        "--max-total-tokens",
        "4096",
    ]
    return penstock_server(flags)


async def _turn(port: int, prompts: Sequence[str], num_tokens: int) -> list[float]:
    """TTFT in seconds of prompts that are sent together."""
    load, now = Load("turn", len(prompts), 1, num_tokens, ANSWER_TOKENS), time.perf_counter()
    samples = await asyncio.gather(*(_ask(port, PENSTOCK, prompt, load, now) for prompt in prompts))
    return [sample.ttft_s for sample in samples]


def measure_turns(ports: dict[str, int], words: Sequence[str], num_turns: int, seed: str) -> list[Row]:
    """All conversations take their turns together, on both servers.

    The history contains random words instead of the model's answers, so that both servers get the same prompts.
    """
    source = random.Random(seed)
    histories = [prompt_of(words, TURN_TOKENS, source) for _ in range(NUM_CONVERSATIONS)]
    rows = []
    for turn in range(1, num_turns + 1):
        row: Row = {"history_tokens": (turn - 1) * TURN_TOKENS, "ttft_s": {}}
        for name in list(ports)[:: 1 if turn % 2 else -1]:
            before = metrics_of(ports[name])
            row["ttft_s"][name] = asyncio.run(_turn(ports[name], histories, turn * TURN_TOKENS))
            if name == "on":
                after = metrics_of(ports[name])
                row["queried_tokens"], row["hit_tokens"] = (after[k] - before.get(k, 0.0) for k in (QUERIED, HIT))
        rows.append(row)
        histories = [history + prompt_of(words, TURN_TOKENS, source) for history in histories]
    return rows


def measure_overhead(ports: dict[str, int], words: Sequence[str], num_pairs: int, seed: str) -> list[Row]:
    """Tokens per second for random prompts without a cache hit, on both servers, alternating."""
    rows = []
    for pair in range(num_pairs):
        load = Load("random", 8, 1, 128, 32)
        row: Row = {}
        for name in list(ports)[:: 1 if pair % 2 else -1]:
            before = metrics_of(ports[name])
            result = run(ports[name], PENSTOCK, load, words, f"{seed}/{pair}")
            after = metrics_of(ports[name])
            row[name] = result.tokens_per_s
            row[f"{name}_hit_tokens"] = after.get(HIT, 0.0) - before.get(HIT, 0.0)
        rows.append(row)
    return rows


def ttft_ratio(row: Row) -> float:
    """Ratio of the median TTFT without the cache to that with it, for one turn."""
    return percentile(row["ttft_s"]["off"], 0.5) / percentile(row["ttft_s"]["on"], 0.5)


def overhead(rows: Sequence[Row]) -> tuple[float, float]:
    """Relative throughput change due to the cache: mean over the pairs and its standard error."""
    shares = [row["on"] / row["off"] - 1 for row in rows]
    mean = sum(shares) / len(shares)
    spread = sum((share - mean) ** 2 for share in shares)
    return mean, (spread / max(1, len(shares) - 1) / len(shares)) ** 0.5


def report(record: dict[str, Any]) -> str:
    rows = []
    for cells in zip(*record["turns"], strict=True):
        hit = sum(cell["hit_tokens"] for cell in cells) / max(1.0, sum(cell["queried_tokens"] for cell in cells))
        medians = [
            percentile([percentile(cell["ttft_s"][name], 0.5) for cell in cells], 0.5) * 1e3 for name in ("off", "on")
        ]
        ratio = percentile([ttft_ratio(cell) for cell in cells], 0.5)
        rows.append(
            [str(cells[0]["history_tokens"]), *(f"{ms:.0f}" for ms in medians), f"{ratio:.2f}", f"{100 * hit:.1f} %"]
        )
    table = markdown(["history tokens", "off: TTFT ms", "on: TTFT ms", "off / on", "hit rate"], rows)
    mean, error = overhead(record["random"])
    return (
        f"{title(record)}{NUM_CONVERSATIONS} conversations at once, {TURN_TOKENS} tokens a turn:\n\n{table}\n"
        f"Random prompts, where nothing is found: throughput {100 * mean:+.2f} % ± {100 * error:.2f} % "
        f"({len(record['random'])} pairs).\n"
    )


def main() -> None:
    parser = option_parser(__doc__, num_repeats=2)
    parser.add_argument("--turns", type=int, default=TARGET_HISTORY_TOKENS // TURN_TOKENS + 1)
    parser.add_argument("--pairs", type=int, default=24, help="pairs of random-prompt loads")
    options = parser.parse_args()
    words = peers.prompt_words()
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "turns": [],
        "random": [],
    }
    with contextlib.ExitStack() as servers:
        ports = {"on": free_port(), "off": free_port()}
        for name, port in ports.items():
            servers.enter_context(running(server_with(name == "on"), port))
            run(port, PENSTOCK, Load("warm-up", NUM_CONVERSATIONS, 1, 128, 8), words, "warm-up")
        for repeat in range(options.repeats):
            print(f"conversations, repeat {repeat + 1}", flush=True)
            record["turns"].append(measure_turns(ports, words, options.turns, f"turns {repeat} {os.getpid()}"))
        print("random prompts", flush=True)
        record["random"] = measure_overhead(ports, words, options.pairs, f"random {os.getpid()}")
    keep(record, "multi-turn", report(record), options.out)


if __name__ == "__main__":
    main()
