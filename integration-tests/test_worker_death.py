"""kill -9 of any worker at any time: streams pause, and go on with exactly the tokens they would have had."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from binary import Server, start

TOKENS = 120
PROMPTS = ["A long story:", "The capital of France is", "def fibonacci(n):", "Once upon a time " * 40]
PARAMETERS: list[dict] = [
    {},
    {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1},
    {"do_sample": True, "temperature": 1.2, "top_k": 50, "frequency_penalty": 0.3},
]
REQUESTS = [
    {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS, "seed": 7, **parameters}}
    for prompt in PROMPTS
    for parameters in PARAMETERS
]


class Stream:
    """One request on a thread of its own."""

    def __init__(self, server: Server, request: dict) -> None:
        self.events: list[dict] = []
        self.failure: Exception | None = None
        self._server, self._request = server, request
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - told by `result`, with the server's own words
            self.failure = error

    def _follow(self) -> None:
        body = json.dumps(self._request).encode()
        request = urllib.request.Request(
            self._server.url + "/generate_stream", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=180) as response:
            for line in response:
                if line.startswith(b"data:"):
                    self.events.append(json.loads(line[5:]))

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> tuple[list[tuple[int, float, str]], str]:
        """Tokens with their logprobs, and the whole text."""
        self._thread.join()
        assert self.failure is None, f"{self.failure!r}; {self._server.last_lines()}"
        assert self.events, self._server.last_lines()
        assert "error" not in self.events[-1], f"{self.events[-1]}; {self._server.last_lines()}"
        tokens = [event["token"] for event in self.events]
        assert len(tokens) <= TOKENS
        return [(token["id"], token["logprob"], token["text"]) for token in tokens], self.events[-1]["generated_text"]


def health(server: Server) -> int:
    try:
        return urllib.request.urlopen(server.url + "/health", timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


def metric(server: Server, name: str) -> float:
    text = urllib.request.urlopen(server.url + "/metrics", timeout=10).read().decode()
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


def wait_until(condition, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ranks(server: Server) -> list[int]:
    """Pids of the workers that serve."""
    return server.worker_groups()[0]


@pytest.fixture(scope="module", params=[1, 2])
def mortal(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = start("--num-shard", str(request.param))
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def undisturbed(mortal: Server) -> list[tuple]:
    return [stream.result() for stream in [Stream(mortal, request) for request in REQUESTS]]


@pytest.mark.parametrize("moment", ["prefill", "decode", "late"])
def test_streams_go_on_with_exactly_their_tokens(mortal: Server, undisturbed: list[tuple], moment: str) -> None:
    restarts = metric(mortal, "penstock_worker_restarts")
    workers = ranks(mortal)
    streams = [Stream(mortal, request) for request in REQUESTS]
    least = {"prefill": 0, "decode": 5, "late": TOKENS // 2}[moment]
    wait_until(lambda: sum(len(stream.events) > least for stream in streams) >= min(least, 3))
    os.kill(workers[-1], signal.SIGKILL)
    wait_until(lambda: health(mortal) == 503)
    assert [stream.result() for stream in streams] == undisturbed
    assert metric(mortal, "penstock_worker_restarts") == restarts + 1
    wait_until(lambda: health(mortal) == 200)


def test_many_deaths_at_random_moments_change_nothing(mortal: Server, undisturbed: list[tuple]) -> None:
    moments = random.Random(5)
    restarts = metric(mortal, "penstock_worker_restarts")
    streams = [Stream(mortal, request) for request in REQUESTS]
    for _ in range(3):
        wait_until(lambda: health(mortal) == 200)
        time.sleep(moments.uniform(0.0, 0.6))
        if not any(stream.running() for stream in streams):
            break
        os.kill(moments.choice(ranks(mortal)), signal.SIGKILL)
        wait_until(lambda: health(mortal) == 503)
    assert [stream.result() for stream in streams] == undisturbed
    assert metric(mortal, "penstock_worker_restarts") > restarts


def test_requests_that_come_while_nobody_works_are_answered(mortal: Server, undisturbed: list[tuple]) -> None:
    os.kill(ranks(mortal)[0], signal.SIGKILL)
    wait_until(lambda: health(mortal) == 503)
    assert [stream.result() for stream in [Stream(mortal, request) for request in REQUESTS]] == undisturbed


def test_the_death_of_the_process_that_workers_are_forked_from_changes_nothing(
    mortal: Server, undisturbed: list[tuple]
) -> None:
    wait_until(lambda: health(mortal) == 200)
    before = mortal.processes()
    restarts = metric(mortal, "penstock_worker_restarts")
    streams = [Stream(mortal, request) for request in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > 5 for stream in streams) >= 3)
    os.kill(mortal.fork_server_pid(), signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    assert metric(mortal, "penstock_worker_restarts") == restarts + 1
    assert not set(before) & set(mortal.processes())
    assert any("the fork server was killed by SIGKILL" in line for line in mortal.lines)
