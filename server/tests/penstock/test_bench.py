"""`penstock bench`: what is wrong is said at once, AIPerf's summary becomes points, and the plot shows them."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock_server.bench import __main__ as bench
from penstock_server.bench.aiperf import read
from penstock_server.bench.endpoint import BenchError
from penstock_server.bench.point import Percentiles, Point

Serve = Callable[[dict[str, tuple[int, Any]]], str]
MODELS = {"data": [{"id": "tiny"}]}
NUMBERS = ["--input-tokens", "8", "--output-tokens", "8", "--requests-per-stream", "1"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that answer each path with a status and a JSON body, and any other path with 404."""
    running = []

    def start(routes: dict[str, tuple[int, Any]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                status, body = routes.get(self.path, (404, {}))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def run(capsys: pytest.CaptureFixture[str], url: str, folder: Path, *more: str) -> str:
    """What the program says about a run that fails."""
    arguments = ["--url", url, "--endpoint", "chat", *NUMBERS, "--output", str(folder), *more, "--concurrency", "1"]
    assert bench.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


@pytest.fixture
def with_aiperf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_aiperf", lambda: "/bin/false")


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "find_aiperf", lambda: None)
    error = run(capsys, "http://127.0.0.1:9", tmp_path)
    assert "needs aiperf" in error
    assert "pip install '.[bench]'" in error


@pytest.mark.usefixtures("with_aiperf")
def test_what_cannot_be_measured_is_said_at_once(
    capsys: pytest.CaptureFixture[str], serve: Serve, tmp_path: Path
) -> None:
    assert "is not the URL of a server" in run(capsys, "127.0.0.1:3000", tmp_path)
    assert "no server answers at http://127.0.0.1:9/v1/models" in run(capsys, "http://127.0.0.1:9", tmp_path)
    assert "names no model; it answered 404" in run(capsys, serve({}), tmp_path)
    models = {"/v1/models": (200, MODELS)}
    assert "has no route /v1/chat/completions (404); try --endpoint" in run(capsys, serve(models), tmp_path)
    locked = serve({**models, "/v1/chat/completions": (401, {})})
    assert "set OPENAI_API_KEY" in run(capsys, locked, tmp_path)
    strict = serve({**models, "/v1/chat/completions": (422, {"error": "unknown field ignore_eos"})})
    assert "add --stop-at-eos" in run(capsys, strict, tmp_path)
    assert "--stop-at-eos" not in run(capsys, strict, tmp_path, "--stop-at-eos")
    good = serve({**models, "/v1/chat/completions": (200, {})})
    assert "no server answers at http://127.0.0.1:9" in run(capsys, good, tmp_path, "--against", "http://127.0.0.1:9")
    assert "aiperf ended with status 1" in run(capsys, good, tmp_path)
    assert "is not empty; choose another folder" in run(capsys, good, tmp_path)
    assert "cannot be used: " in run(capsys, good, Path("/dev/null/result"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(serve: Serve, tmp_path: Path, number: int) -> None:
    aiperf = tmp_path / "aiperf"
    aiperf.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/child.new\nmv {tmp_path}/child.new {tmp_path}/child\nwait\n"
    )
    aiperf.chmod(0o755)
    url = serve({"/v1/models": (200, MODELS), "/v1/chat/completions": (200, {})})
    arguments = [
        "--url",
        url,
        "--endpoint",
        "chat",
        "--output",
        str(tmp_path / "result"),
        "--concurrency",
        "1",
        *NUMBERS,
    ]
    command = [sys.executable, "-m", "penstock_server.bench", *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    while not (tmp_path / "child").exists():
        assert process.poll() is None
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    assert is_running(child)
    process.send_signal(number)
    assert process.wait(60) == 130
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists, and is not only waiting for its parent to notice its end."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def summary(**changes: Any) -> dict[str, Any]:
    """What AIPerf writes, as far as it is read."""
    times = {"unit": "ms", "avg": 5.0, "p50": 1.0, "p90": 2.0, "p99": 3.0}
    return {
        "request_count": {"avg": 8.0},
        "output_token_throughput": {"avg": 50.0},
        "request_latency": times,
        "time_to_first_token": times,
        "inter_chunk_latency": times,
        "error_summary": [],
    } | changes


def test_a_summary_becomes_a_point() -> None:
    times = Percentiles(1, 2, 3)
    failed = [{"count": 2, "error_details": {"message": "500"}}]
    assert read(summary(error_summary=failed), 4) == Point(4, 50, times, times, times, num_requests=8, num_failed=2)
    without = summary()
    del without["inter_chunk_latency"]
    assert read(without, 4).gap is None
    with pytest.raises(BenchError, match="no request succeeded with 4 streams: 500"):
        read({"error_summary": failed}, 4)
    uncounted = summary()
    del uncounted["output_token_throughput"]
    with pytest.raises(BenchError, match="no token counts"):
        read(uncounted, 4)


def test_percentiles_are_values_that_were_measured() -> None:
    assert Percentiles.of([5.0]) == Percentiles(5, 5, 5)
    assert Percentiles.of([float(value) for value in range(100, 0, -1)]) == Percentiles(50, 90, 99)


SERVERS = {
    "ours": [
        Point(1, 10, Percentiles(1, 2, 3), Percentiles(4, 5, 6), Percentiles(7, 8, 9), 1),
        Point(8, 60, Percentiles(11, 12, 13), Percentiles(14, 15, 16), Percentiles(17, 18, 19), 8),
    ],
    "theirs": [Point(1, 5, None, None, None, 1), Point(8, 30, None, None, None, 8)],
}


def test_the_plot_shows_every_point() -> None:
    from penstock_server.bench.plot import figure

    throughput, *times = figure("title", SERVERS).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in throughput.lines}
    assert lines == {"ours": [[1, 10], [8, 60]], "theirs": [[1, 5], [8, 30]]}
    expected = [[[1, 1], [8, 11]], [[1, 2], [8, 12]], [[1, 3], [8, 13]]]
    for number, axes in enumerate(times):
        shown = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xydata())]
        assert shown == [[[x, y + 3 * number] for x, y in line] for line in expected]


def test_the_same_points_give_the_same_file() -> None:
    from penstock_server.bench.plot import svg

    first = svg("title", SERVERS)
    assert first == svg("title", SERVERS)
    assert b">ours<" in first
