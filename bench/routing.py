"""Compares routers in front of eight replicas: `penstock route`, sglang-router, vllm-router, and round robin.

A replica is a real server whose worker is a mock (bench/worker): queue, batch, KV blocks and prefix cache are real,
and a step takes the time of a cost model. `penstock route` uses the replicas by the engine protocol, the peers by
OpenAI's routes of the same servers. Steps take about five times as long as on one data-center GPU with a model of 8B
parameters, so that routers, replicas and clients together need less than two cores. Quote the ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
from compare import Server, fetch, free_port, metrics_of, penstock_server, running
from load import PENSTOCK, LoadError, ask, openai_dialect, percentile, prompt_of
from process import cpu_s_of
from result import heading, keep, machine, option_parser, title
from router_cost import build_worker, scripted, word_tokens
from table import markdown

NUM_REPLICAS, NUM_BLOCKS = 8, 4096  # blocks of 16 tokens per replica
COST = {"STEP_MICROSECONDS": 25_000, "PROMPT_TOKEN_NANOSECONDS": 500_000, "NEW_TOKEN_NANOSECONDS": 100_000}
OUTPUT_TOKENS, MAX_BATCH = 16, 256
MANY = 8192  # requests that every router and replica accepts at a time
SECRET = "the-secret-of-this-benchmark"
COMPLETIONS = openai_dialect("/v1/completions", lambda prompt, _: {"model": "mock", "prompt": prompt})
COUNTERS = {"queried": "penstock_prefix_queried_tokens", "hit": "penstock_prefix_hit_tokens"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """`parts` are the texts it consists of, each as its seed and its length in tokens. due_s: in an open loop."""

    parts: tuple[tuple[str, int], ...]
    due_s: float = 0.0

    def text(self, words: Sequence[str], name: str) -> str:
        """The same parts give the same text; other names give other texts of the same lengths."""
        return "".join(prompt_of(words, num, random.Random(f"{name}/{seed}")) for seed, num in self.parts)


def zipf(source: random.Random, num: int) -> int:
    """A number below `num`, with a probability of about 1 / (rank + 1)."""
    return min(num - 1, int((num + 1) ** source.random()) - 1)


def chats(source: random.Random, seconds: float, rate: float, num_users: int = 160) -> list[Prompt]:
    """An open loop of conversations. Users are Zipf-distributed and share eight system prompts of 500 tokens; a turn
    adds 120 tokens, and a conversation of twelve turns is followed by a new one. Five of twenty seconds have 2.5 times
    the rate of the other seconds."""
    num_turns: dict[int, int] = {}
    prompts, due_s = [], 0.0
    while True:
        due_s += source.expovariate(rate * (20 / 11) if due_s % 20 < 5 else rate * (8 / 11))
        if due_s >= seconds:
            return prompts
        user = zipf(source, num_users)
        turn = num_turns[user] = num_turns.get(user, -1) + 1
        conversation, num_before = divmod(turn, 12)
        turns = [(f"{user}/{conversation}/{number}", 120) for number in range(num_before + 1)]
        prompts.append(Prompt(((f"system {user % 8}", 500), *turns), due_s))


def hot_spot(source: random.Random, num_clients: int, num_groups: int = 64) -> list[Prompt]:
    """One prompt of each of `num_clients` clients at once: the system prompt, of 2,048 tokens, of a Zipf-distributed
    group, and a question of 128 tokens, as in the peers' benchmark of shared prefixes, whose groups are equal."""
    return [
        Prompt(((f"group {zipf(source, num_groups)}", 2048), (f"question {number}", 128)))
        for number in range(num_clients)
    ]


def replica(engine_port: int, max_batch: int) -> Server:
    """A server with an engine listener; its worker is to be scripted."""
    listen = ["--engine-listen", f"127.0.0.1:{engine_port}", "--standby", "off"]
    sizes = ["--max-batch-size", str(max_batch), "--max-batch-prefill-tokens", str(max(2048, max_batch))]
    return penstock_server([*listen, *sizes, "--max-total-tokens", "4096", *limits(MANY)])


def limits(max_requests: int) -> list[str]:
    """Nothing else is refused."""
    return ["--max-concurrent-requests", str(max_requests), "--max-queued-tokens", str(1 << 30)]


@contextlib.contextmanager
def mock_replicas(
    words: Sequence[str], cost: Mapping[str, int], num_blocks: int, max_batch: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Runs the replicas. Yields their ports for HTTP and for the engine protocol."""
    environment = {f"SCRIPT_{name}": str(value) for name, value in {**cost, "NUM_BLOCKS": num_blocks}.items()}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        ports = ([free_port() for _ in range(NUM_REPLICAS)], [free_port() for _ in range(NUM_REPLICAS)])
        worker, token_ids = build_worker(), word_tokens(words)
        for port, engine_port in zip(*ports, strict=True):
            server = scripted(replica(engine_port, max_batch), worker, folder, token_ids)
            server.environment.update(environment, ENGINE_SECRET=SECRET)
            stack.enter_context(running(server, port))
        yield ports


def routers(ports: Sequence[int], engine_ports: Sequence[int], max_requests: int = MANY) -> dict[str, Server]:
    """The routers by name. The peers have their default, cache-aware policy, and limits that refuse nothing."""
    engines = [f"--replica=http://127.0.0.1:{port}" for port in engine_ports]
    program = penstock_server([]).command(0)[0]
    route = [program, "route", *engines, *limits(max_requests), "--max-total-tokens", "4096", "--port"]
    penstock = Server("penstock", "none", lambda port: [*route, str(port)], PENSTOCK, {"ENGINE_SECRET": SECRET})
    found = {"penstock": penstock}
    for name in peers.ROUTERS:
        found[name] = peer(name, "cache_aware", ports)
    return found | {"round robin": peer("vllm-router", "round_robin", ports)}


def peer(name: str, policy: str, ports: Sequence[int]) -> Server:
    """A router of the package index before HTTP servers."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    fixed = [*peers.router_command(name), "--policy", policy, "--worker-urls", *urls, "--host", "127.0.0.1"]
    fixed += ["--max-concurrent-requests", str(MANY), "--queue-size", str(MANY)]

    def command(port: int) -> list[str]:
        return [*fixed, "--port", str(port), "--prometheus-port", str(free_port())]

    return Server(name, "none", command, COMPLETIONS)


def counters(ports: Sequence[int]) -> list[dict[str, float]]:
    """What each replica has counted so far."""
    samples = [metrics_of(port) for port in ports]
    return [{key: sample.get(name, 0.0) for key, name in COUNTERS.items()} for sample in samples]


async def send(port: int, prompts: Sequence[tuple[float, str]]) -> list[dict[str, float]]:
    """Sends each text when it is due. Returns when it was sent, its first token and its end; without an answer, its
    status."""
    start = time.perf_counter()

    async def one(due_s: float, text: str) -> dict[str, float]:
        await asyncio.sleep(due_s - (time.perf_counter() - start))
        exchange = await ask(port, COMPLETIONS, text, OUTPUT_TOKENS)
        sent_s = exchange.sent - start
        if exchange.parser.status != 200 or b'"completion_tokens"' not in exchange.last:
            return {"sent_s": sent_s, "status": exchange.parser.status or 0}
        return {"sent_s": sent_s, "ttft_s": exchange.event_times[0] - exchange.sent, "ended_s": exchange.ended - start}

    return await asyncio.gather(*(one(due_s, text) for due_s, text in prompts))


def measure(router: Server, ports: Sequence[int], prompts: Sequence[Prompt], words: Sequence[str], name: str) -> Any:
    """Starts the router and sends the prompts through it."""
    texts = [(prompt.due_s, prompt.text(words, name)) for prompt in prompts]
    port = free_port()
    with running(router, port) as started:
        wait_for_models(port)
        before, cpu_s = counters(ports), cpu_s_of(started.pid)
        answers = asyncio.run(send(port, texts))
        router_cpu_s = cpu_s_of(started.pid) - cpu_s
    counted = [
        {key: after[key] - value for key, value in replica.items()}
        for replica, after in zip(before, counters(ports), strict=True)
    ]
    return {"answers": answers, "replicas": counted, "router_cpu_s": router_cpu_s} | summary(answers, counted)


def wait_for_models(port: int) -> None:
    """A peer is healthy before it has found its workers."""
    for _ in range(600):
        with contextlib.suppress(TypeError, ValueError, KeyError):
            if json.loads(fetch(port, "/v1/models") or "null")["data"]:
                return
        time.sleep(0.1)
    raise LoadError("the router found no replica in a minute")


def summary(answers: Sequence[dict[str, float]], counted: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures of one run. imbalance: most prompt tokens that a replica computed, over the mean."""
    ttfts = [answer["ttft_s"] for answer in answers if "ttft_s" in answer]
    computed = [replica["queried"] - replica["hit"] for replica in counted]
    return {
        "num_errors": sum("status" in answer for answer in answers),
        "hit_rate": sum(replica["hit"] for replica in counted)
        / max(1.0, sum(replica["queried"] for replica in counted)),
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p99_s": percentile(ttfts, 0.99),
        "wall_s": max(answer.get("ended_s", 0.0) for answer in answers),
        "imbalance": max(computed) * len(computed) / max(1.0, sum(computed)),
    }


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the open loop of chats")
    parser.add_argument("--rate", type=float, default=32.0, help="its mean requests per second")
    parser.add_argument("--clients", type=int, default=2048, help="clients of the hot spot")
    parser.add_argument("--only", nargs="+", help="names of the routers to measure")
    parser.add_argument("--loads", nargs="+", choices=("chats", "hot spot"), default=["chats", "hot spot"])
    options = parser.parse_args()
    words = peers.prompt_words()
    loads: dict[str, Callable[[random.Random], list[Prompt]]] = {
        "chats": lambda source: chats(source, options.seconds, options.rate),
        "hot spot": lambda source: hot_spot(source, options.clients),
    }
    record: dict[str, Any] = {**heading(), "machine": machine(), "cost": COST, "packages": peers.ROUTERS, "repeats": []}
    with mock_replicas(words, COST, NUM_BLOCKS, MAX_BATCH) as (ports, engine_ports):
        for repeat in range(options.repeats):
            measured: dict[str, Any] = {}
            for name, router in routers(ports, engine_ports).items():
                if options.only and name not in options.only:
                    continue
                for load in options.loads:
                    prompts = loads[load](random.Random(f"{load} {repeat}"))
                    found = measure(router, ports, prompts, words, f"{name} {load} {repeat}")
                    measured.setdefault(load, {})[name] = found
                    figures = {key: round(value, 3) for key, value in found.items() if isinstance(value, int | float)}
                    print(f"  {load}, {name}, {len(prompts)} requests: {figures}", flush=True)
            record["repeats"].append(measured)
    keep(record, "routing", report(record), options.out)


def report(record: dict[str, Any]) -> str:
    """For each load, a row of medians for each router."""
    text = title(record)
    for load in record["repeats"][0]:
        rows = []
        for name in record["repeats"][0][load]:
            runs = [repeat[load][name] for repeat in record["repeats"]]

            def median(key: str, runs: Sequence[dict[str, Any]] = runs) -> float:
                return percentile([run[key] for run in runs], 0.5)

            cpu_ms = [run["router_cpu_s"] / len(run["answers"]) * 1e3 for run in runs]
            rows.append(
                [
                    name,
                    f"{100 * median('hit_rate'):.1f} %",
                    f"{median('ttft_p50_s'):.2f}",
                    f"{median('ttft_p99_s'):.2f}",
                    f"{median('wall_s'):.1f}",
                    f"{median('imbalance'):.2f}",
                    f"{percentile(cpu_ms, 0.5):.2f}",
                    str(sum(run["num_errors"] for run in runs)),
                ]
            )
        columns = ["hit rate", "TTFT p50 s", "TTFT p99 s", "all s", "imbalance", "router CPU ms a request", "errors"]
        num_requests = len(record["repeats"][0][load][name]["answers"])
        text += f"{load}, {num_requests} requests:\n\n{markdown(['router', *columns], rows)}\n"
    return text


if __name__ == "__main__":
    try:
        main()
    except (LoadError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
