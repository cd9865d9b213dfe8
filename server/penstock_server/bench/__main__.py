"""`python -m penstock_server.bench`: measures one server, or two side by side. `penstock bench` runs this.

Exits with status 1 and one line of explanation if nothing can be measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock_server.bench.aiperf import Workload, find_aiperf, measure
from penstock_server.bench.endpoint import ENDPOINTS, BenchError, model_of, try_out
from penstock_server.bench.point import Percentiles, Point
from penstock_server.errors import ConfigError

MISSING = "penstock bench needs {}; run `pip install '.[bench]'` in the source tree of Penstock"
MAX_SEED = 1 << 32
COLUMNS = ("streams", "tokens/s", "TTFT p50", "p90", "p99", "gap p50", "p90", "p99", "requests", "failed")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; the launcher has checked their ranges and defaults."""
    parser = argparse.ArgumentParser(prog="penstock bench")
    parser.add_argument("--url", required=True)
    parser.add_argument("--against")
    parser.add_argument("--concurrency", type=int, nargs="+", required=True)
    parser.add_argument("--endpoint", choices=ENDPOINTS, required=True)
    parser.add_argument("--input-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--requests-per-stream", type=int, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dataset")
    parser.add_argument("--tokenizer")
    parser.add_argument("--stop-at-eos", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def checked_url(given: str) -> str:
    """Without a slash at its end."""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BenchError(f"{given!r} is not the URL of a server; it looks like http://127.0.0.1:3000")
    return given.rstrip("/")


def find_program() -> str:
    """AIPerf's path. Raises BenchError if it or matplotlib is missing."""
    program = find_aiperf()
    found = {"aiperf": program, "matplotlib": importlib.util.find_spec("matplotlib")}
    missing = [name for name, there in found.items() if there is None]
    if missing or program is None:
        raise BenchError(MISSING.format(" and ".join(missing)))
    return program


def tokenizer_of(model: str) -> str:
    """What AIPerf loads as the tokenizer of a model: the folder of the embedded one, or the model's name on the hub."""
    from penstock_server.prepare import EMBEDDED_MODEL_ID, prepare

    if model != EMBEDDED_MODEL_ID:
        return model
    try:
        return prepare(None).folder
    except ConfigError:  # another server's: its package is not installed here
        return model


def make_empty(folder: Path) -> None:
    """Makes the folder for the result. Raises BenchError if it holds something, such as another result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BenchError(f"{folder} is not empty; choose another folder with --output")
    except OSError as error:
        raise BenchError(f"{folder} cannot be used: {error.strerror}; choose another folder with --output") from None


def run(options: argparse.Namespace) -> None:
    """Measures every server at every concurrency, and writes result.json and plot.svg. Raises BenchError."""
    program = find_program()
    urls = list(dict.fromkeys(checked_url(url) for url in (options.url, options.against) if url))
    make_empty(options.output)
    # Greedy, and of equal length, so that servers are compared at the same work. TGI knows no temperature of 0.
    extra: dict[str, Any] = {} if options.stop_at_eos else {"ignore_eos": True}
    extra |= {} if options.endpoint == "generate" else {"temperature": 0}
    models = {}
    for url in urls:
        models[url] = model_of(url)
        try_out(url, options.endpoint, models[url], extra)
    workload = Workload(
        endpoint=options.endpoint,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        requests_per_stream=options.requests_per_stream,
        seed=secrets.randbelow(MAX_SEED) if options.seed is None else options.seed,
        dataset=options.dataset,
        tokenizer=options.tokenizer or tokenizer_of(models[urls[0]]),
        extra=extra,
    )
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    servers: dict[str, list[Point]] = {}
    levels = sorted(set(options.concurrency))
    for number, url in enumerate(urls):
        print(f"{url}, {models[url]}", " ".join(f"{column:>8}" for column in COLUMNS), sep="\n", flush=True)
        servers[url] = []
        for concurrency in levels:
            folder = options.output / f"server-{number + 1}" / f"{concurrency}-streams"
            if sys.stdout.isatty():
                print(f"{concurrency:>8} measuring …", end="\r", flush=True)
            point = measure(program, url, models[url], concurrency, workload, folder)
            servers[url].append(point)
            print(" ".join(f"{cell:>8}" for cell in cells(point)), flush=True)
    record = {
        "started": started,
        "workload": asdict(workload),
        "servers": [
            {"url": url, "model": models[url], "points": [asdict(point) for point in points]}
            for url, points in servers.items()
        ],
    }
    result_file = options.output / "result.json"
    result_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    # Not above, because matplotlib may be missing.
    from penstock_server.bench.plot import svg

    title = f"{options.endpoint}, {options.dataset or f'{options.input_tokens} tokens in'}, {options.output_tokens} out"
    plot_file = options.output / "plot.svg"
    plot_file.write_bytes(svg(title, servers))
    print(f"wrote {result_file} and {plot_file}")


def cells(point: Point) -> Iterator[str]:
    """A row of the table; times in milliseconds."""
    yield str(point.concurrency)
    yield f"{point.tokens_per_s:.1f}"
    for times in (point.ttft, point.gap):
        yield from _times(times)
    yield str(point.num_requests)
    yield str(point.num_failed)


def _times(times: Percentiles | None) -> list[str]:
    return ["-"] * 3 if times is None else [f"{value:.1f}" for value in (times.p50, times.p90, times.p99)]


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(parse(arguments))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends AIPerf, too
    sys.exit(main())
