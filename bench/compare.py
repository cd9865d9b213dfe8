"""Compares servers in one run: the machine's limits, then each server in turn under the same loads, repeated.

Only one server runs at a time. Writes every raw sample to a dated JSON file and a readable table next to it. Quote the
ratios: the machines are shared and noisy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import plot
from load import LLAMA_CPP, PENSTOCK, Dialect, Load, LoadError, run
from process import memory_of
from result import ROOT, beside, from_root, heading, keep, option_parser
from table import BASE, report

START_TIMEOUT_S = 240
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
REQUESTS_PER_STREAM = {1: 8, 8: 3, 32: 2}
STANDBY_READY = "the standby group is ready"
WEIGHTS = {"bf16": True, "4-bit": False}  # the embedded model's, by whether they are dequantized
Measure = Callable[[str], dict[str, Any]]  # seed of the prompts → result


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure: the command that starts it on a port, and its API dialect."""

    name: str
    weights: str
    command: Callable[[int], list[str]]
    dialect: Dialect
    environment: dict[str, str] = field(default_factory=dict)
    settled: str = ""  # log text that marks the end of background start-up work


def penstock_server(extra: Sequence[str], *, dequantize: bool = True) -> Server:
    """Penstock: the installed binary, or the one that cargo built. dequantize: serve the embedded model in bf16, like
    its peers, not in its file's 4 bits."""
    installed = Path(sys.executable).with_name("penstock")
    built = ROOT / "target" / "release" / "penstock"
    binary = installed if installed.exists() else built
    if not binary.exists():
        raise SystemExit("error: no penstock binary; run `make setup` (or cargo build --release) first")
    paths = [str(ROOT / "server"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {} if binary == installed else {"PYTHONPATH": ":".join(paths), "PENSTOCK_PYTHON": sys.executable}
    command = [str(binary), *(["--dequantize"] if dequantize else []), *extra, "--port"]
    return Server("penstock", "bf16", lambda port: [*command, str(port)], PENSTOCK, environment, STANDBY_READY)


def llama_server(
    name: str, gguf: Path, max_streams: int, extra: Sequence[str], isa: str = "", slot_tokens: int = 1024
) -> Server:
    """llama.cpp with its defaults (continuous batching, flash attention where it helps), without its products for AMX,
    which crash, and with a slot of `slot_tokens` for every stream, built for an instruction set of `peers.LLAMA_ISAS`.

    Its prompt cache is off, because no prompt is repeated.
    """
    binary = peers.build_llama(isa=isa)
    slots = ["--parallel", str(max_streams), "--ctx-size", str(max_streams * slot_tokens), "--cache-ram", "0"]
    threads = ["--threads", str(len(os.sched_getaffinity(0)))]
    fixed = [str(binary), "--model", str(gguf), *threads, *slots, "--offline", *extra]
    weights = gguf.name.split(".")[-2].lower()
    return Server(name, weights, lambda port: [*fixed, "--port", str(port)], LLAMA_CPP)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fetch(port: int, path: str) -> str | None:
    """The body at `path`, or None unless the status is 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is healthy."""

    pid: int
    healthy_s: float  # since its start
    wait_for: Callable[[str], float]  # waits until its log contains a text; seconds since its start
    logged: Callable[[], str]  # its log so far


@contextlib.contextmanager
def running(server: Server, port: int, *, in_own_session: bool = True) -> Iterator[Running]:
    """Yields once the server has settled; kills its process group afterwards. in_own_session: with autogroups, Linux
    shares processor time fairly between sessions; within one, between threads."""
    environment = {**os.environ, **server.environment}
    with tempfile.NamedTemporaryFile(prefix=f"{server.name}-", suffix=".log") as log:
        start = time.monotonic()
        group: dict[str, Any] = {"start_new_session": True} if in_own_session else {"process_group": 0}
        process = subprocess.Popen(server.command(port), stdout=log, stderr=subprocess.STDOUT, env=environment, **group)
        try:

            def logged() -> str:
                return Path(log.name).read_text(encoding="utf-8", errors="replace")

            def wait_until(holds: Callable[[], bool], what: str) -> float:
                while not holds():
                    if process.poll() is not None or time.monotonic() - start > START_TIMEOUT_S:
                        raise LoadError(f"{server.name} did not become {what}:\n{logged()[-2000:]}")
                    time.sleep(0.05)
                return time.monotonic() - start

            healthy_s = wait_until(lambda: fetch(port, "/health") is not None, "healthy")

            def wait_for(text: str) -> float:
                return wait_until(lambda: text in logged(), f'so far as to log "{text}"')

            wait_for(server.settled)
            yield Running(process.pid, healthy_s, wait_for, logged)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def metrics_of(port: int) -> dict[str, float]:
    """The server's Prometheus samples without histogram buckets; empty when it has none."""
    samples = {}
    for line in (fetch(port, "/metrics") or "").splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#") and "_bucket{" not in name:
            with contextlib.suppress(ValueError):
                samples[name] = float(value)
    return samples


def stream_load(num_streams: int, num_requests: int | None = None) -> Load:
    """num_requests: per stream; None: enough for some seconds."""
    num_requests = num_requests or REQUESTS_PER_STREAM.get(num_streams, 2)
    return Load(f"{num_streams} streams", num_streams, num_requests, INPUT_TOKENS, OUTPUT_TOKENS)


def loads_of(streams: Sequence[int], quick: bool) -> list[Load]:
    """The loads that every server gets, in this order."""
    few = 1 if quick else None
    main = [stream_load(num_streams, few) for num_streams in streams]
    prompt = Load("ttft 512", 1, 3 if quick else 7, 512, 4)
    decode = Load("decode", 1, few or 3, 8, 128)
    return [*main, prompt, decode]


def measure(server: Server, loads: Sequence[Load], words: Sequence[str], seed: str) -> dict[str, Any]:
    """Starts, warms, loads and stops one server."""
    port = free_port()
    with running(server, port) as started:
        warmth = max(load.num_streams for load in loads)
        run(port, server.dialect, Load("warm-up", warmth, 1, INPUT_TOKENS, 8), words, seed)
        run(port, server.dialect, Load("warm-up", 1, 2, 512, 8), words, seed)
        measured = {}
        for load in loads:
            before = metrics_of(port)
            result = run(port, server.dialect, load, words, seed)
            after = metrics_of(port)
            short = sum(sample.num_tokens < load.num_output_tokens for sample in result.samples)
            measured[load.name] = {
                "tokens_per_s": result.tokens_per_s,
                "decode_tokens_per_s": result.decode_tokens_per_s,
                "wall_s": result.wall_s,
                "num_tokens": result.num_tokens,
                "num_ended_early": short,
                "client_cpu_share": result.client_cpu_s / result.wall_s,
                "ttft_s": [round(sample.ttft_s, 6) for sample in result.samples],
                "sent_s": [round(sample.sent_s, 6) for sample in result.samples],
                "gaps_us": [[round(gap * 1e6) for gap in sample.gaps_s] for sample in result.samples],
                "metrics": {name: value - before.get(name, 0) for name, value in after.items()},
            }
            print(f"  {load.name:>10}: {result.tokens_per_s:7.1f} tok/s", flush=True)
        gauges = metrics_of(port)
        return {"healthy_s": started.healthy_s, "loads": measured, "memory": memory_of(started.pid), "metrics": gauges}


def measure_all(measures: Mapping[str, Measure], repeat: int) -> dict[str, Any]:
    """The result of each measurement by name; a failed one has its error as the result."""
    results: dict[str, Any] = {}
    for name, measure_one in measures.items():
        print(f"{name}, repeat {repeat + 1}", flush=True)
        try:
            results[name] = measure_one(str(repeat))
        except (LoadError, OSError, subprocess.CalledProcessError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            results[name] = {"error": str(error)}
    return results


def exit_on_errors(record: Mapping[str, Any]) -> None:
    """Exits with status 1 if a measurement failed."""
    if any("error" in result for measured in record["repeats"] for result in measured.values()):
        raise SystemExit(1)


def embedded_folder() -> Path:
    """The embedded model as a prepared folder."""
    command = [sys.executable, "-m", "penstock_server.prepare"]
    prepared = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return Path(prepared["folder"])


def in_own_process(script: str, *arguments: str) -> Any:
    """Runs a script of this folder and reads the JSON it prints last."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def torch_rss_bytes() -> int:
    """Resident bytes of an idle Python process that has imported torch."""
    code = "import torch; print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout) * 1024


def main() -> None:
    parser = option_parser(__doc__, num_repeats=2)
    names = ("penstock", "llama.cpp", "llama.cpp-q4", "transformers")
    parser.add_argument("--only", nargs="+", choices=names, default=["penstock", "llama.cpp", "transformers"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--quick", action="store_true", help="one repeat with few requests, as a smoke test")
    parser.add_argument("--penstock-args", default="", help="more flags for penstock, as one string")
    parser.add_argument("--llama-args", default="", help="more flags for llama-server, as one string")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    most = max(options.streams)
    llama_args = shlex.split(options.llama_args)
    makers: dict[str, Callable[[], Server]] = {
        "penstock": lambda: penstock_server(shlex.split(options.penstock_args)),
        "llama.cpp": lambda: llama_server("llama.cpp", peers.bf16_gguf(), most, llama_args),
        "llama.cpp-q4": lambda: llama_server("llama.cpp-q4", peers.embedded_gguf(), most, llama_args),
    }
    servers = [makers[name]() for name in options.only if name in makers]
    words, loads = peers.prompt_words(), loads_of(options.streams, options.quick)
    print("limits", flush=True)
    record: dict[str, Any] = {
        **heading(),
        "python": sys.version.split()[0],
        "limits": in_own_process("limits.py"),
        "torch_rss_bytes": torch_rss_bytes(),
        "model": {"name": peers.embedded_gguf().name, **peers.model_shape()},
        "load": {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS, "streams": options.streams},
        "servers": {
            server.name: {"weights": server.weights, "command": from_root(server.command(0))} for server in servers
        },
    }
    if "llama.cpp" in options.only:
        record["servers"]["llama.cpp"]["source"] = peers.LLAMA_SOURCE
    measures: dict[str, Measure] = {
        server.name: lambda seed, server=server: measure(server, loads, words, seed) for server in servers
    }
    if "transformers" in options.only:
        streams = [str(count) for count in options.streams]
        measures["transformers"] = lambda seed: in_own_process(
            "peers.py", "transformers", "--seed", seed, "--streams", *streams
        )
    record["repeats"] = [measure_all(measures, i) for i in range(1 if options.quick else options.repeats)]
    record["limits_after"] = in_own_process("limits.py")
    # Without all peers it is another benchmark, so that it does not take the place of the whole comparison.
    name = "compare" if BASE in record["repeats"][0] else "compare-partly"
    path = keep(record, name, report(record), options.out)
    beside(path, ".svg").write_bytes(plot.comparison(record))
    exit_on_errors(record)


if __name__ == "__main__":
    main()
