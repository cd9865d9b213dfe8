"""Measures starts with a warm page cache: from the start of the process to the first 200 of /health, what of it imports
cost, the memory beyond torch and the KV cache, and the speed of a stream while the standby group loads.

Memory is that of all processes of an idle server: proportional bytes, so that pages which several processes share count
once. Subtracted are those of a process that has only imported torch, and the whole KV cache, whose pages are all there.

`--also NAME=BINARY` starts another installation of Penstock too, in alternating order. Quote the ratios.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peers
from compare import (
    STANDBY_READY,
    Measure,
    Server,
    exit_on_errors,
    free_port,
    measure_all,
    metrics_of,
    penstock_server,
    running,
)
from figure import start, table_of
from load import PENSTOCK, Load, run
from process import cpu_s_of, memory_of
from result import from_root, heading, keep, machine, option_parser, title

PROGRAMS = {  # each is timed from the interpreter's start to its end
    "interpreter": ["-c", ""],
    "torch": ["-c", "import torch"],
    "worker": ["-m", "penstock_server.process.fork_server"],  # ends at once, because nothing asks it for a worker
}
QUIET_S = 2.0  # a server that uses less than a hundredth of a core for this long is idle
WINDOW_S = 5.0  # the standby group starts to load one second after ready


@dataclass(frozen=True, slots=True)
class Installation:
    """A server that counts as settled when it is healthy, and the interpreter that runs its workers."""

    server: Server
    python: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.server.environment}


def this_one() -> Installation:
    server = replace(penstock_server([], dequantize=False), settled="")
    return Installation(server, server.environment.get("PENSTOCK_PYTHON", sys.executable))


def another(text: str) -> Installation:
    """NAME=BINARY. It must not find this one's packages."""
    name, _, path = text.partition("=")
    binary = Path(path).absolute()
    python = binary.with_name("python")
    if not name or name == "penstock" or not binary.is_file() or not python.is_file():
        raise SystemExit(
            f'error: --also is "{text}", must be NAME=BINARY with another name and a python next to BINARY'
        )
    environment = {"PYTHONPATH": "", "PENSTOCK_PYTHON": str(python)}
    server = Server(name, "4-bit", lambda port: [str(binary), "--port", str(port)], PENSTOCK, environment)
    return Installation(server, str(python))


def cost_of(installation: Installation, arguments: Sequence[str]) -> dict[str, float]:
    """Wall and processor seconds of a Python program."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    wall_start, cpu_start = time.perf_counter(), cpu_s()
    subprocess.run(
        [installation.python, *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=installation.environment,
    )
    return {"wall_s": time.perf_counter() - wall_start, "cpu_s": cpu_s() - cpu_start}


def torch_memory(installation: Installation) -> dict[str, Any]:
    """Memory of an idle process that has only imported torch. Its proportional bytes are all of its bytes
    only if no process outside of this benchmark has torch loaded."""
    code = "import sys, torch; print(flush=True); sys.stdin.read()"
    command = [installation.python, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=installation.environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        (memory,) = memory_of(process.pid)
        process.stdin.close()
    return memory


def idle_memory(installation: Installation) -> list[dict[str, Any]]:
    """Memory of the processes of a server without a standby group, once its KV cache has all pages, which it takes from
    "ready" on."""
    server, port = installation.server, free_port()
    alone = replace(server, command=lambda port: [*server.command(port), "--standby", "off"])
    with running(alone, port) as started:
        used_s = cpu_s_of(started.pid)
        while True:
            time.sleep(QUIET_S)
            before_s, used_s = used_s, cpu_s_of(started.pid)
            if used_s - before_s < QUIET_S / 100:
                return memory_of(started.pid)


def stream_rate(port: int, words: Sequence[str], seed: str) -> float:
    """Tokens per second of one stream during about WINDOW_S."""
    num_tokens, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < WINDOW_S:
        num_tokens += run(port, PENSTOCK, Load(f"at {num_tokens}", 1, 1, 16, 64), words, seed).num_tokens
    return num_tokens / seconds


def measure(installation: Installation, words: Sequence[str], seed: str) -> dict[str, Any]:
    costs = {name: cost_of(installation, arguments) for name, arguments in PROGRAMS.items()}
    torch, idle = torch_memory(installation), idle_memory(installation)
    port = free_port()
    with running(installation.server, port) as started:
        result: dict[str, Any] = {
            "ready_s": started.healthy_s,
            "ready_cpu_s": cpu_s_of(started.pid),
            "programs": costs,
            "torch": torch,
            "torch_pss_bytes": torch["pss_bytes"],
            "memory": {"without a standby group": idle},
            "tokens_per_s": {"at ready": stream_rate(port, words, f"{seed}/first")},
            "standby_ready_s": started.wait_for(STANDBY_READY),
        }
        result["tokens_per_s"]["later"] = stream_rate(port, words, f"{seed}/later")
        result["memory"]["with the standby group"] = memory_of(started.pid)
        ((size, unit),) = re.findall(r"([\d.]+) ([MG]iB) of weights", started.logged())
        pool_tokens = metrics_of(port)["tgi_batch_max_total_tokens"]
    result["weight_bytes"] = round(float(size) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit])
    result["kv_bytes"] = pool_tokens * peers.model_shape()["kv_bytes_per_token"]
    rates = result["tokens_per_s"]
    print(
        f"  ready after {result['ready_s']:.2f} s ({result['ready_cpu_s']:.2f} s of processor time), then "
        f"{rates['at ready']:.0f}, later {rates['later']:.0f} tokens/s",
        flush=True,
    )
    return result


def warm(installation: Installation) -> None:
    """Reads all files once: the model's, the libraries' and the compiled modules'."""
    print(f"warm-up of {installation.server.name}", flush=True)
    with running(installation.server, free_port()):
        pass


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME=BINARY", help="other installations")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    installations = [this_one(), *map(another, options.also)]
    words = peers.prompt_words()
    for installation in installations:
        warm(installation)
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "model": {"name": peers.embedded_gguf().name, "file_bytes": peers.embedded_gguf().stat().st_size},
        "servers": {one.server.name: {"command": from_root(one.server.command(0))} for one in installations},
        "repeats": [],
    }
    for repeat in range(options.repeats):
        measures: dict[str, Measure] = {
            one.server.name: functools.partial(measure, one, words) for one in installations[:: -1 if repeat % 2 else 1]
        }
        record["repeats"].append(measure_all(measures, repeat))
    keep(record, "start", title(record) + table_of(start(record)), options.out)
    exit_on_errors(record)


if __name__ == "__main__":
    main()
