"""Measures how long prompts disturb running streams: the gaps between the tokens of eight streams, without and with
4,000-token prompts that arrive one after the other, for Penstock and llama.cpp in the same run.

Servers run one at a time. Both loads use the same streams. Only gaps during which all streams run count. Quote the
ratios.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import peers
from compare import Server, exit_on_errors, free_port, llama_server, measure_all, metrics_of, penstock_server, running
from load import Dialect, Load, LoadError, Sample, _ask, _run, openai_dialect, percentile, prompt_of, run
from result import from_root, heading, keep, machine, option_parser, title
from table import markdown

NUM_STREAMS, STREAM_INPUT_TOKENS = 8, 32
PROMPT_TOKENS, ANSWER_TOKENS = 4000, 4
MAX_PROMPTS = 200
# The OpenAI route accepts `min_tokens`, so that no stream ends before the others.
COMPLETIONS = openai_dialect(
    "/v1/completions", lambda prompt, num: {"model": "any", "prompt": prompt, "min_tokens": num}
)


@dataclass(slots=True)
class Disturbed:
    """The samples of the streams and of the prompts that arrived meanwhile."""

    streams: list[Sample]
    prompts: list[Sample]


async def _side_by_side(
    port: int, dialect: Dialect, load: Load, words: Sequence[str], seed: str, with_prompts: bool
) -> Disturbed:
    source = random.Random(f"{seed}/prompts")
    # Made beforehand: it would block the event loop that takes the times.
    texts = [prompt_of(words, PROMPT_TOKENS, source) for _ in range(MAX_PROMPTS if with_prompts else 0)]
    prompt = Load("prompt", 1, 1, PROMPT_TOKENS, ANSWER_TOKENS)
    start_s = time.perf_counter()
    streams = asyncio.create_task(_run(port, dialect, load, words, seed))
    prompts = []
    for text in texts:
        if streams.done():
            break
        prompts.append(await _ask(port, dialect, text, prompt, start_s))
    return Disturbed((await streams).samples, prompts)


def common_gaps(samples: Sequence[Sample]) -> list[float]:
    """Gaps in seconds between the last first token and the first last token of all streams."""
    begin = max(sample.sent_s + sample.ttft_s for sample in samples)
    end = min(sample.sent_s + sample.ttft_s + sum(sample.gaps_s) for sample in samples)
    gaps = []
    for sample in samples:
        times = itertools.accumulate(sample.gaps_s, initial=sample.sent_s + sample.ttft_s)
        gaps += [later - earlier for earlier, later in itertools.pairwise(times) if earlier >= begin and later <= end]
    return gaps


def measure(
    server: Server, dialect: Dialect, words: Sequence[str], seed: str, num_tokens: int
) -> dict[str, dict[str, Any]]:
    """Both loads on one fresh server, first the one without prompts."""
    port = free_port()
    load = Load("streams", NUM_STREAMS, 1, STREAM_INPUT_TOKENS, num_tokens)
    result = {}
    with running(server, port):
        run(port, dialect, Load("warm-up", NUM_STREAMS, 1, STREAM_INPUT_TOKENS, 16), words, seed)
        run(port, dialect, Load("warm-up", 1, 1, PROMPT_TOKENS, ANSWER_TOKENS), words, seed)
        for name in ("without", "with"):
            before = metrics_of(port)
            run_seed = f"{seed}/{name}"
            disturbed = asyncio.run(_side_by_side(port, dialect, load, words, run_seed, name == "with"))
            short = [sample.num_tokens for sample in disturbed.streams if sample.num_tokens < num_tokens]
            if short:
                raise LoadError(f"{len(short)} of the streams ended early")
            gaps = common_gaps(disturbed.streams)
            after = metrics_of(port)
            result[name] = {
                "gaps_us": [round(gap * 1e6) for gap in gaps],
                "prompt_ttft_s": [round(sample.ttft_s, 6) for sample in disturbed.prompts],
                "metrics": {key: value - before.get(key, 0) for key, value in after.items() if "step" in key},
                "target_s": after.get("penstock_inter_token_target_seconds"),
            }
            print(f"  {name:>7}: {line(result[name])}", flush=True)
    return result


def milliseconds(gaps_us: Sequence[int]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    return percentile(gaps_us, 0.5) / 1e3, percentile(gaps_us, 0.99) / 1e3, max(gaps_us) / 1e3


def line(result: dict[str, Any]) -> str:
    p50, p99, longest = milliseconds(result["gaps_us"])
    prompts = result["prompt_ttft_s"]
    beside = f", {len(prompts)} prompts, TTFT {percentile(prompts, 0.5):.2f} s" if prompts else ""
    return f"gaps p50 {p50:.1f}, p99 {p99:.1f}, max {longest:.1f} ms{beside}"


def report(record: dict[str, Any]) -> str:
    """Medians over the repeats; the ratio is that of the same repeat's percentiles."""
    header = ["server", "load", "p50 ms", "p99 ms", "max ms", "p99 to p99 without", "prompts", "prompt TTFT s"]
    rows = []
    for name in record["servers"]:
        results = [repeat[name] for repeat in record["repeats"] if "error" not in repeat[name]]
        for load in ("without", "with") if results else ():
            figures = [milliseconds(result[load]["gaps_us"]) for result in results]
            cells = [f"{percentile(column, 0.5):.1f}" for column in zip(*figures, strict=True)]
            ratio, count, ttft = "", "", ""
            if load == "with":
                ratios = [
                    milliseconds(result["with"]["gaps_us"])[1] / milliseconds(result["without"]["gaps_us"])[1]
                    for result in results
                ]
                ratio = f"{percentile(ratios, 0.5):.2f} ({', '.join(f'{one:.2f}' for one in ratios)})"
                prompts = [second for result in results for second in result["with"]["prompt_ttft_s"]]
                count, ttft = str(len(prompts)), f"{percentile(prompts, 0.5):.2f}"
            rows.append([name, load, *cells, ratio, count, ttft])
    rows.append(["vLLM", "its wheel has kernels for CUDA only: not measured", "", "", "", "", "", ""])
    return (
        f"{title(record)}Gaps between the tokens of {NUM_STREAMS} streams, without and with prompts of {PROMPT_TOKENS} "
        f"tokens that arrive one after the other:\n\n{markdown(header, rows)}"
    )


def main() -> None:
    parser = option_parser(__doc__, num_repeats=2)
    parser.add_argument("--only", nargs="+", choices=("penstock", "llama.cpp"), default=["penstock", "llama.cpp"])
    parser.add_argument("--tokens", type=int, default=512, help="tokens generated per stream")
    parser.add_argument("--penstock-args", default="", help="more flags for penstock, as one string")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    servers: dict[str, tuple[Server, Dialect]] = {}
    if "penstock" in options.only:
        servers["penstock"] = (penstock_server(shlex.split(options.penstock_args)), COMPLETIONS)
    if "llama.cpp" in options.only:
        num_slots = NUM_STREAMS + 1
        context = ["--ctx-size", str(num_slots * (PROMPT_TOKENS + 240))]
        server = llama_server("llama.cpp", peers.bf16_gguf(), num_slots, context)
        servers["llama.cpp"] = (server, server.dialect)
    words = peers.prompt_words()
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "load": {"streams": NUM_STREAMS, "tokens": options.tokens, "prompt_tokens": PROMPT_TOKENS},
        "servers": {name: {"command": from_root(server.command(0))} for name, (server, _) in servers.items()},
    }
    measures = {
        name: lambda seed, server=server, dialect=dialect: measure(server, dialect, words, seed, options.tokens)
        for name, (server, dialect) in servers.items()
    }
    record["repeats"] = [measure_all(measures, repeat) for repeat in range(options.repeats)]
    keep(record, "latency", report(record), options.out)
    exit_on_errors(record)


if __name__ == "__main__":
    main()
