"""kill -9 of a worker at any time: streams pause, then continue with exactly the same tokens."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from binary import Server, paused, start
from client import send
from fault.probe import health, metric, restarts, wait_for_loss, wait_for_restart, wait_until

pytestmark = pytest.mark.native

TOKENS = 60
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


# Takes longer than what a test does meanwhile; the test drops it.
ENDLESS: dict[str, Any] = {"inputs": "Count:", "parameters": {"max_new_tokens": 8000, "ignore_eos": True}}
PREFILL_STEPS = 'tgi_batch_inference_success{method="prefill"}'


class Stream:
    """A streaming request on its own thread."""

    def __init__(self, server: Server, request: dict) -> None:
        self.events: list[dict] = []
        self.failure: Exception | None = None
        self._server, self._request = server, request
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - `result` reports it with the end of the log
            self.failure = error

    def _follow(self) -> None:
        connection, response = send(self._server, "/generate_stream", self._request)
        self._socket = connection.sock
        for line in response:
            if line.startswith(b"data:"):
                self.events.append(json.loads(line[5:]))
        connection.close()

    def drop(self) -> None:
        """Disconnects after the first events."""
        assert self._socket is not None
        with suppress(OSError):  # the stream has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def last_event(self) -> dict:
        """The last event, which may be an error."""
        self._thread.join()
        assert self.events, f"{self.failure!r}; {self._server.last_lines()}"
        return self.events[-1]

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> tuple[list[tuple[int, float, str]], str]:
        """([(id, logprob, text) of each token], generated text)"""
        last = self.last_event()
        assert self.failure is None, f"{self.failure!r}; {self._server.last_lines()}"
        assert "error" not in last, f"{last}; {self._server.last_lines()}"
        tokens = [event["token"] for event in self.events]
        assert len(tokens) <= self._request["parameters"]["max_new_tokens"]
        return [(token["id"], token["logprob"], token["text"]) for token in tokens], last["generated_text"]


def ranks(server: Server) -> list[int]:
    """Pids of the serving workers."""
    return server.worker_groups()[0]


def answers_across_a_kill(server: Server, requests: list[dict]) -> list[tuple]:
    """What the streams of `requests` give while a worker is killed, which ends them on its replacement."""
    before = restarts(server)
    streams = [Stream(server, request) for request in requests]
    wait_until(lambda: all(len(stream.events) > 3 for stream in streams))
    os.kill(ranks(server)[0], signal.SIGKILL)
    results = [stream.result() for stream in streams]
    wait_for_restart(server, before)
    return results


@pytest.fixture(scope="module", params=[1, 2])
def mortal(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = start("--num-shard", str(request.param))
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def undisturbed(mortal: Server) -> list[tuple]:
    return [stream.result() for stream in [Stream(mortal, request) for request in REQUESTS]]


def kill_in_a_prefill(server: Server) -> tuple[dict, Stream]:
    """Kills the last rank after the first step of a long prompt. Returns the request and its stream."""
    worker = ranks(server)[-1]
    while True:
        steps = int(metric(server, PREFILL_STEPS))
        # About 2,900 tokens, which take six steps. Another attempt has another prompt, which no prefix cache has.
        prompt = " ".join(map(str, range(steps, steps + 700)))
        request = {"inputs": prompt, "parameters": {"max_new_tokens": 16}}
        stream = Stream(server, request)
        wait_until(lambda steps=steps: metric(server, PREFILL_STEPS) > steps)
        with paused(worker):
            if not stream.events:
                os.kill(worker, signal.SIGKILL)
                return request, stream
        stream.result()  # the prefill was complete already


def test_a_kill_during_a_prefill_changes_no_token(mortal: Server) -> None:
    wait_until(lambda: health(mortal) == 200)
    before = restarts(mortal)
    request, stream = kill_in_a_prefill(mortal)
    wait_for_loss(mortal, before)
    disturbed = stream.result()
    wait_for_restart(mortal, before)
    # Computed afterwards: the first request must not find its prompt in the prefix cache.
    assert Stream(mortal, request).result() == disturbed


@pytest.mark.parametrize("num_tokens", [5, TOKENS // 2])
def test_a_kill_during_decode_changes_no_token(mortal: Server, undisturbed: list[tuple], num_tokens: int) -> None:
    before = restarts(mortal)
    workers = ranks(mortal)
    streams = [Stream(mortal, request) for request in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > num_tokens for stream in streams) >= 3)
    os.kill(workers[-1], signal.SIGKILL)
    wait_for_loss(mortal, before)
    assert [stream.result() for stream in streams] == undisturbed
    wait_for_restart(mortal, before)
    wait_until(lambda: health(mortal) == 200)


def has_progressed(stream: Stream, num_events: int) -> bool:
    """Whether the stream is past what two steps in flight gave it at most, when it had this many events."""
    return len(stream.events) >= num_events + 2 or not stream.running()


def test_repeated_kills_at_random_moments_change_no_token(mortal: Server, undisturbed: list[tuple]) -> None:
    moments = random.Random(5)
    streams = [Stream(mortal, request) for request in REQUESTS]
    endless = Stream(mortal, ENDLESS)  # each kill hits a sequence that runs
    running = [*streams, endless]
    for _ in range(3):
        wait_until(lambda: health(mortal) == 200)
        # A sequence that is not past the lost steps at the next kill is quarantined, and a third kill may end it. What
        # was sent before the last kill is no progress since then, but may still be read now.
        time.sleep(1.0)
        seen = [len(stream.events) for stream in running]
        wait_until(lambda seen=seen: all(has_progressed(*pair) for pair in zip(running, seen, strict=True)))
        time.sleep(moments.uniform(0.0, 0.6))
        before = restarts(mortal)
        os.kill(moments.choice(ranks(mortal)), signal.SIGKILL)
        wait_for_loss(mortal, before)
    assert [stream.result() for stream in streams] == undisturbed
    endless.drop()


def test_requests_during_a_restart_are_answered(mortal: Server, undisturbed: list[tuple]) -> None:
    wait_until(lambda: health(mortal) == 200)
    before = restarts(mortal)
    os.kill(ranks(mortal)[0], signal.SIGKILL)
    wait_for_loss(mortal, before)
    assert [stream.result() for stream in [Stream(mortal, request) for request in REQUESTS]] == undisturbed


def test_the_death_of_the_fork_server_changes_no_token(mortal: Server, undisturbed: list[tuple]) -> None:
    wait_until(lambda: health(mortal) == 200)
    processes, before = mortal.processes(), restarts(mortal)
    streams = [Stream(mortal, request) for request in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > 5 for stream in streams) >= 3)
    os.kill(mortal.fork_server_pid(), signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    wait_for_restart(mortal, before)
    wait_until(lambda: not set(processes) & set(mortal.processes()), "the processes are gone")
    wait_until(lambda: any("the fork server was killed by SIGKILL" in line for line in mortal.lines))
