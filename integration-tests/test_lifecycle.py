"""Startup, refused startups, shutdown, and failures of processes."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from binary import PENSTOCK, START_TIMEOUT_S, TIMEOUT_S, Server, launch, paused, reserved_port, start
from client import ask
from fault.probe import health, wait_until
from test_worker_death import ENDLESS, Stream

SHUTTING_DOWN = {"error": "the server is shutting down", "error_type": "shutting_down"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(alive, pids)), f"of the processes {pids} none is left")


def started(server: Server, requests: list[dict]) -> list[Stream]:
    """Streams that have received their first token."""
    streams = [Stream(server, request) for request in requests]
    wait_until(lambda: all(stream.events for stream in streams), "every stream has a token")
    return streams


def test_a_signal_finishes_running_streams_refuses_requests_and_exits_0() -> None:
    """SIGINT; the tests below send SIGTERM, which every server of these tests gets at its end."""
    server = start()
    processes = [*server.processes(), *server.renderer_pids()]
    request = {"inputs": "A long story:", "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
    endless, *streams = started(server, [ENDLESS, *[request] * 15])
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: health(server) == 503)
    report = ask(server, "/health/ready")
    assert (report.status, report.json["live"]["ok"], report.json["ready"]["ok"]) == (503, True, False)
    assert ask(server, "/health/live").status == 200
    for path in ("/generate", "/generate_stream"):
        answer = ask(server, path, {"inputs": "Hi"})
        assert (answer.status, answer.json) == (503, SHUTTING_DOWN)
    answer = ask(server, "/v1/completions", {"prompt": "Hi", "stream": True})
    assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
    assert endless.running()
    endless.drop()
    for stream in streams:
        tokens, text = stream.result()
        assert len(tokens) == 60
        assert text
    assert server.process.wait(TIMEOUT_S) == 0
    wait_until_gone(processes)


def test_streams_beyond_the_grace_period_get_an_error_and_the_exit_status_is_0() -> None:
    server = start("--graceful-termination-timeout", "1")
    streams = started(server, [ENDLESS] * 16)
    assert server.stop() == 0
    assert [stream.last_event() for stream in streams] == [SHUTTING_DOWN] * 16


def test_a_second_signal_stops_the_server_immediately() -> None:
    server = start()
    processes = [*server.processes(), *server.renderer_pids()]
    streams = started(server, [ENDLESS] * 4)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: health(server) == 503)
    assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert not any(stream.last_event().get("generated_text") for stream in streams)
    wait_until_gone(processes)


def messages(server: Server) -> list[str]:
    """The messages of the log, each with its figures."""
    records = [json.loads(line)["fields"] for line in server.lines]
    return [" ".join(map(str, [record.pop("message"), *record.values()])) for record in records]


@pytest.fixture(scope="module")
def detailed() -> Iterator[Server]:
    """Logs all, and waits 10 s for a step: the default depends on this machine's slowest."""
    server = start("--step-timeout", "10", env={"LOG_LEVEL": "debug"})
    yield server
    assert server.stop() == 0


def test_the_level_debug_has_each_phase_and_each_default_with_its_reason(detailed: Server) -> None:
    lines = messages(detailed)
    assert any(line.startswith("phase warm up: worst decode") for line in lines)
    assert any(line.startswith("threads per rank is ") for line in lines)
    assert any(line.startswith("attention of 9 heads of 64") for line in lines)


def test_a_hung_worker_makes_the_server_unhealthy_until_it_resumes(detailed: Server) -> None:
    server = detailed
    worker = server.worker_groups()[0][0]
    (stream,) = started(server, [ENDLESS])
    wait_until(lambda: ask(server, "/health/ready").status == 200)
    with paused(worker):
        wait_until(lambda: not ask(server, "/health/ready").json["progressing"]["ok"], "the worker hangs")
        answer = ask(server, "/health")
        assert (answer.status, answer.json) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
        assert ask(server, "/health/live").status == 200
        num_tokens = len(stream.events)
    wait_until(lambda: len(stream.events) > num_tokens, "the stream goes on")
    stream.drop()
    wait_until(lambda: health(server) == 200)


def test_a_process_that_renders_chats_may_map_half_a_gibibyte_and_its_program(server: Server) -> None:
    """What the allocator reserves at the start would raise the limit, which counts from there."""
    pids = server.renderer_pids()
    assert pids
    for pid in pids:
        assert 512 << 20 <= resource.prlimit(pid, resource.RLIMIT_AS)[0] < 1 << 30


def test_repeated_worker_failures_end_streams_with_an_error_and_the_server_with_status_1() -> None:
    server = start()
    (stream,) = started(server, [ENDLESS])
    deadline = time.monotonic() + TIMEOUT_S
    while server.process.poll() is None:
        assert time.monotonic() < deadline
        try:
            for pid in server.worker_pids():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process has already exited
        time.sleep(0.05)
    last = stream.last_event()
    assert last["error_type"] == "generation"
    assert "5 failures in a row" in last["error"]
    assert server.process.returncode == 1


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """A server without flags, which the last of its tests kills."""
    server = start()
    yield server
    server.stop()


def test_a_plain_start_is_twelve_lines_with_round_figures(plain: Server) -> None:
    wait_until(lambda: any("the standby group is ready" in line for line in plain.lines))
    lines = messages(plain)
    assert len(lines) <= 12, "\n".join(lines)
    assert not [line for line in lines if re.search(r"\d\.\d{3,}(?!\.)", line)]
    assert not [line for line in lines if re.search(r"\b\d{10,}\b", line)], "bytes are in MiB or GiB"


def test_a_killed_launcher_leaves_no_worker(plain: Server) -> None:
    processes = [*plain.processes(), *plain.renderer_pids()]
    assert len(processes) > 1
    plain.process.kill()
    plain.process.wait()
    wait_until_gone(processes)


@pytest.mark.native
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="each group of a GPU has weights of its own")
def test_a_standby_group_shares_the_weights(server: Server) -> None:
    wait_until(lambda: any("the standby group is ready" in line for line in server.lines))
    standby = server.worker_groups()[-1][0]
    fields = re.findall(r"^Private_\w+: +(\d+) kB", Path(f"/proc/{standby}/smaps_rollup").read_text(), re.MULTILINE)
    (weights_mib,) = re.findall(r"([\d.]+) MiB of weights", "\n".join(server.lines))
    assert sum(map(int, fields)) / 1024 < float(weights_mib) / 2


def refused(*arguments: str, port: str = "0", env: dict[str, str] | None = None) -> str:
    """The output of a startup that must fail."""
    process = launch(*arguments, port=port, env=env)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert "panicked" not in output
    return output


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refused(port=port)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refused("--model-id", str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "safetensors" in refused("--model-id", str(tmp_path))


def tiny_model(folder: Path) -> None:
    """Save a random model with two attention heads and the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    prepare = [sys.executable, "-m", "penstock_server.prepare"]
    prepared = json.loads(subprocess.run(prepare, capture_output=True, text=True, check=True).stdout)["folder"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(prepared) / name, folder)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_more_ranks_than_attention_heads_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    output = refused("--model-id", str(tmp_path), "--num-shard", "3")
    assert "3 ranks" in output
    assert "2 attention heads" in output


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused("--model-id", str(tmp_path))


def test_unsupported_flags_are_refused_by_name() -> None:
    assert "--quantize" in refused("--quantize", "awq")
    assert "--no-such-flag" in refused("--no-such-flag")
    assert "quantize" in refused(env={"QUANTIZE": "awq"}).lower()


def test_contradicting_limits_are_refused() -> None:
    output = refused("--max-input-tokens", "100", "--max-total-tokens", "50")
    assert "max-input-tokens" in output or "max_input_tokens" in output


def test_version_and_help_are_printed() -> None:
    assert "penstock" in subprocess.run([PENSTOCK, "--version"], capture_output=True, text=True).stdout
    assert "--num-shard" in subprocess.run([PENSTOCK, "--help"], capture_output=True, text=True).stdout


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_the_port_accepts_connections_only_after_warm_up(port: int) -> None:
    process = launch(port=str(port))
    lines: list[str] = []
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
    try:
        num_refused, deadline = 0, time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_S) as answer:
                    assert answer.status == 200
                answered = datetime.now(UTC)
                break
            except (urllib.error.URLError, TimeoutError):
                num_refused += 1
                time.sleep(0.02)
        else:
            pytest.fail(f"the server did not become ready within {START_TIMEOUT_S} s")
        assert num_refused > 0
        # The log is read on another thread, so the line may arrive later than the response; its stamp is not later.
        while not (found := [line for line in lines if "phases of the start" in line and "warm up" in line]):
            assert time.monotonic() < deadline, "the end of warm-up was not logged"
            time.sleep(0.02)
        warmed_up = datetime.fromisoformat(json.loads(found[0])["timestamp"])
        assert warmed_up < answered, "the port was open before the end of warm-up"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
