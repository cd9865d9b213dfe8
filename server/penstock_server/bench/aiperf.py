"""Runs AIPerf, which generates the load and measures it, once for each server and concurrency.

AIPerf is used as a program: it pins its dependencies narrowly, so it may be installed in an environment of its own
(docs/adr/user-tools.md). It is looked for next to this interpreter, and then on the PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_server.bench.endpoint import ENDPOINTS, BenchError
from penstock_server.bench.point import Percentiles, Point

RESULT = "profile_export_aiperf.json"


@dataclass(frozen=True, slots=True)
class Workload:
    """What every server gets. dataset: a JSONL file of prompts, or the name of one of AIPerf's public data sets; None:
    random text of `input_tokens` tokens."""

    endpoint: str
    input_tokens: int
    output_tokens: int
    requests_per_stream: int
    seed: int
    dataset: str | None
    tokenizer: str
    extra: Mapping[str, Any]  # fields of every request


def find_aiperf() -> str | None:
    """The program's path, or None."""
    return shutil.which("aiperf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def measure(program: str, url: str, model: str, concurrency: int, workload: Workload, folder: Path) -> Point:
    """Measures a server at one concurrency; AIPerf's files go to `folder`. Raises BenchError."""
    folder.mkdir(parents=True)
    log = folder / "aiperf.log"
    status = _run([program, *_arguments(url, model, concurrency, workload, folder)], log)
    result = folder / RESULT
    if status != 0 or not result.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n  ".join(lines[-15:])
        raise BenchError(f"aiperf ended with status {status}; the end of {log}:\n  {end}")
    return read(json.loads(result.read_text(encoding="utf-8")), concurrency)


def _run(command: list[str], log: Path) -> int:
    """Runs a program to its end and returns its status. An interrupt of this process ends all of the program's."""
    process = None
    try:
        with log.open("wb") as output, _interrupts_deferred():
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)  # noqa: S603
        return process.wait()
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delivers interrupts when the block ends. One inside Popen would leave a process that nothing stops."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda which, _: came.append(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def _arguments(url: str, model: str, concurrency: int, workload: Workload, folder: Path) -> list[str]:
    endpoint = ENDPOINTS[workload.endpoint]
    num_requests = concurrency * workload.requests_per_stream
    arguments = ["profile", "--url", url, "--endpoint-type", endpoint.aiperf_type, "--streaming"]
    arguments += ["--model", model, "--tokenizer", workload.tokenizer]
    arguments += ["--concurrency", str(concurrency), "--request-count", str(num_requests)]
    arguments += ["--warmup-request-count", str(concurrency)]
    # No prompt repeats, also not at the next concurrency, so prefix caches do not help. All servers get the same ones.
    seed = (workload.seed + concurrency) % (1 << 32)
    arguments += ["--num-dataset-entries", str(num_requests + concurrency), "--random-seed", str(seed)]
    arguments += ["--osl", str(workload.output_tokens)]
    if workload.dataset is None:
        arguments += ["--isl", str(workload.input_tokens)]
    elif Path(workload.dataset).exists():
        arguments += ["--input-file", workload.dataset, "--custom-dataset-type", "single_turn"]
    else:
        arguments += ["--public-dataset", workload.dataset]
    if endpoint.reports_usage:
        arguments.append("--use-server-token-count")
    if workload.endpoint == "chat":
        arguments.append("--use-legacy-max-tokens")  # TGI and llama.cpp know no other name
    if workload.extra:
        arguments += ["--extra-inputs", json.dumps(dict(workload.extra))]
    # Penstock's and the device's own metrics are for the boards.
    arguments += ["--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--output-artifact-dir", str(folder)]
    return arguments


def read(result: Mapping[str, Any], concurrency: int) -> Point:
    """A point from AIPerf's summary. Raises BenchError if no request succeeded, or if its tokens were not counted."""
    num_failed = sum(error["count"] for error in result.get("error_summary") or ())
    if "request_count" not in result:
        first = next(
            (str(error["error_details"]["message"]) for error in result.get("error_summary") or ()), "no request"
        )
        raise BenchError(f"no request succeeded with {concurrency} streams: {first}")
    if "output_token_throughput" not in result:
        raise BenchError("the server's answers have no token counts (`usage`); try another --endpoint")

    def percentiles(name: str) -> Percentiles | None:
        found = result.get(name)
        return None if found is None else Percentiles(found["p50"], found["p90"], found["p99"])

    return Point(
        concurrency=concurrency,
        tokens_per_s=result["output_token_throughput"]["avg"],
        latency=percentiles("request_latency"),
        ttft=percentiles("time_to_first_token"),
        gap=percentiles("inter_chunk_latency"),
        num_requests=int(result["request_count"]["avg"]),
        num_failed=num_failed,
    )
