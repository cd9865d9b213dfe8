"""`penstock bench` with the real AIPerf against the real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from binary import PENSTOCK, Server

# `make chaos` installs it there, because its dependencies contradict those of the tests.
OWN = Path(sys.executable).parent.parent / "aiperf" / "bin"
PATH = f"{OWN}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aiperf", path=PATH) is None, reason="needs aiperf; `make chaos` installs it")
def test_bench_measures_a_server_and_draws_it(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "result"
    load = ["--input-tokens", "16", "--output-tokens", "8", "--requests-per-stream", "2", "--concurrency", "2"]
    command = [PENSTOCK, "bench", "--url", server.url, "--endpoint", "generate", *load, "--output", folder]
    environment = {**os.environ, "PATH": PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads((folder / "result.json").read_text())["servers"]
    (point,) = measured["points"]
    assert (point["concurrency"], point["num_requests"], point["num_failed"]) == (2, 4, 0)
    assert point["tokens_per_s"] > 0
    assert point["ttft"]["p50"] <= point["ttft"]["p99"] <= point["latency"]["p99"]
    assert point["gap"]["p50"] > 0
    assert b">generate, 16 tokens in, 8 out<" in (folder / "plot.svg").read_bytes()
    assert "tokens/s" in done.stdout
