"""Measures overload: goodput, TTFT of admitted requests and time to refusal at three times the server's capacity.

Capacity is measured before and after each repeat by a closed loop with as many clients as the server runs sequences. In
between, requests arrive at random (Poisson) at a multiple of that rate, independently of earlier ones, without retries.
Quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import peers
from compare import free_port, in_own_process, metrics_of, penstock_server, running
from load import PENSTOCK, Load, LoadError, ask, percentile, prompt_of, run
from result import heading, keep, option_parser, title
from table import markdown

INPUT_TOKENS, OUTPUT_TOKENS = 64, 32
RUNNING, WAITING = 32, 16  # sequences per step, and queued requests
RAMP_SHARE = 0.25  # share of the overload phase in which the batch and the queue fill


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the open loop; seconds since the start of the load."""

    due_s: float
    sent_s: float
    status: int
    event_s: list[float]
    ended_s: float
    retry_after_s: int | None

    @property
    def wait_s(self) -> float:
        """Seconds to the first token, or to the refusal."""
        return (self.event_s[0] if self.event_s else self.ended_s) - self.sent_s


async def arrive(port: int, words: Sequence[str], rate: float, seconds: float, seed: str) -> list[Arrival]:
    """Poisson arrivals at `rate` per second; returns them when the last one has been answered."""
    source = random.Random(seed)
    start = time.perf_counter()

    async def one(due_s: float, prompt: str) -> Arrival:
        exchange = await ask(port, PENSTOCK, prompt, OUTPUT_TOKENS)
        events = [at - start for at in exchange.event_times]
        parser = exchange.parser
        if parser.status not in (200, 429) or (parser.status == 200 and b'"details":{' not in exchange.last):
            raise LoadError(f"the server answered {parser.status}: {exchange.last or bytes(parser.body)!r}")
        return Arrival(
            due_s, exchange.sent - start, parser.status, events, exchange.ended - start, parser.retry_after_s
        )

    tasks, due_s = [], 0.0
    while (due_s := due_s + source.expovariate(rate)) < seconds:
        prompt = prompt_of(words, INPUT_TOKENS, source)
        await asyncio.sleep(due_s - (time.perf_counter() - start))
        tasks.append(asyncio.create_task(one(due_s, prompt)))
    return await asyncio.gather(*tasks)


def served_rate(arrivals: Sequence[Arrival], seconds: float) -> float:
    """Tokens per second of completed requests, from the end of the ramp to the last arrival."""
    since_s = seconds * RAMP_SHARE
    times = (at for arrival in arrivals for at in arrival.event_s)
    return sum(since_s <= at < seconds for at in times) / (seconds - since_s)


def closed(port: int, words: Sequence[str], rounds: int, seed: str) -> float:
    """Tokens per second of the closed loop."""
    load = Load("closed", RUNNING, rounds, INPUT_TOKENS, OUTPUT_TOKENS)
    return run(port, PENSTOCK, load, words, seed).tokens_per_s


def measure(port: int, words: Sequence[str], options: argparse.Namespace, seed: str) -> dict[str, Any]:
    """Closed loop, open loop, closed loop; the arrival rate follows from the first."""
    before = closed(port, words, options.rounds, f"{seed} before")
    rate = options.factor * before / OUTPUT_TOKENS
    counted = metrics_of(port)
    arrivals = asyncio.run(arrive(port, words, rate, options.seconds, seed))
    served = served_rate(arrivals, options.seconds)
    after = closed(port, words, options.rounds, f"{seed} after")
    refused = {
        name: value - counted.get(name, 0)
        for name, value in metrics_of(port).items()
        if name.startswith("penstock_requests_refused")
    }
    return {
        "closed_tokens_per_s": [before, after],
        "arrivals_per_s": rate,
        "served_tokens_per_s": served,
        "ratio": served / max(before, after),
        "refused": refused,
        "arrivals": [asdict(arrival) for arrival in arrivals],
    }


def report(record: dict[str, Any]) -> str:
    """One row per repeat."""
    rows = []
    for repeat in record["repeats"]:
        arrivals = [Arrival(**arrival) for arrival in repeat["arrivals"]]
        admitted = [arrival.wait_s for arrival in arrivals if arrival.status == 200]
        refused = [arrival for arrival in arrivals if arrival.status == 429]
        told = [arrival.retry_after_s for arrival in refused if arrival.retry_after_s is not None]
        if not refused or not admitted or len(told) < len(refused):
            raise LoadError(f"{len(admitted)} were served, {len(refused)} refused, {len(told)} got Retry-After")
        waits = [arrival.wait_s for arrival in refused]
        rows.append(
            [
                " / ".join(f"{rate:.0f}" for rate in repeat["closed_tokens_per_s"]),
                f"{repeat['served_tokens_per_s']:.0f}",
                f"{repeat['ratio']:.3f}",
                f"{len(arrivals)}",
                f"{len(admitted)}",
                f"{percentile(admitted, 0.5):.2f} / {percentile(admitted, 0.99):.2f}",
                f"{1e3 * percentile(waits, 0.5):.1f} / {1e3 * percentile(waits, 0.99):.1f}",
                f"{min(told)} to {max(told)}",
                f"{1e3 * max(arrival.sent_s - arrival.due_s for arrival in arrivals):.0f}",
            ]
        )
    head = [
        "closed loop tok/s, before / after",
        "served tok/s",
        "ratio to the better",
        "arrived",
        "let in",
        "TTFT s, p50 / p99",
        "ms to 429, p50 / p99",
        "Retry-After s",
        "latest arrival ms",
    ]
    ratio = statistics.median(repeat["ratio"] for repeat in record["repeats"])
    return (
        f"{title(record)}{RUNNING} generations at once, {WAITING} more may wait; {INPUT_TOKENS} tokens in, "
        f"{OUTPUT_TOKENS} out; arrivals at {record['factor']:g} times the closed loop's rate. Median ratio: "
        f"{ratio:.3f}\n\n{markdown(head, rows)}"
    )


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=25.0, help="duration of the arrivals, per repeat")
    parser.add_argument("--rounds", type=int, default=4, help="requests per client of a closed loop")
    options = parser.parse_args()
    words = peers.prompt_words()
    record: dict[str, Any] = {
        **heading(),
        "limits": in_own_process("limits.py"),
        "factor": options.factor,
        "repeats": [],
    }
    flags = ["--max-batch-size", str(RUNNING), "--max-concurrent-requests", str(RUNNING + WAITING)]
    server, port = penstock_server(flags), free_port()
    with running(server, port):
        run(port, PENSTOCK, Load("warm-up", RUNNING, 1, INPUT_TOKENS, 8), words, "warm-up")
        for repeat in range(options.repeats):
            measured = measure(port, words, options, str(repeat))
            record["repeats"].append(measured)
            print(f"repeat {repeat + 1}: ratio {measured['ratio']:.3f}", flush=True)
    keep(record, "overload", report(record), options.out)


if __name__ == "__main__":
    main()
