"""Streams of `/v1/messages` and `/v1/responses`: a worker's death and other clients' bad requests change no event."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bad_request import dialects
from binary import Server, start
from client import ask, send
from fault.probe import restarts, wait_for_loss, wait_for_restart, wait_until

pytestmark = pytest.mark.native

NUM_TOKENS = 120
STORY = "Tell a long story about a fox and a raven."
SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 40}}, "required": ["place"]}
MESSAGE: dict[str, Any] = {"model": "tgi", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
RESPONSE: dict[str, Any] = {"model": "tgi", "max_output_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
FUNCTION = {"type": "function", "name": "visit", "parameters": SCHEMA}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {**MESSAGE, "messages": [{"role": "user", "content": STORY}]}),
    (
        "/v1/messages",
        {
            **MESSAGE,
            "messages": [{"role": "user", "content": "Visit four places."}],
            "tools": [{"name": "visit", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    ("/v1/responses", {**RESPONSE, "input": STORY}),
    ("/v1/responses", {**RESPONSE, "input": "Visit four places.", "tools": [FUNCTION], "tool_choice": "required"}),
]
# What differs between two answers to one request.
VARIABLE = re.compile(
    r'((?:msg|toolu|resp|rs|fc|call)_)[0-9a-f]+|("(?:created_at|completed_at)": )\d+'
    r'|("(?:input_tokens|cache_read_input_tokens|cached_tokens)": )\d+'
)


class Stream:
    """A streaming request on its own thread."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.events: list[str] = []
        self._arguments = server, path, body
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        connection, response = send(*self._arguments)
        for line in response:
            if line.startswith(b"data:"):
                text = json.dumps(json.loads(line[5:]))
                self.events.append(VARIABLE.sub(lambda found: next(filter(None, found.groups())) + "…", text))
        connection.close()

    def result(self) -> list[str]:
        self._thread.join()
        return [event for event in self.events if event != '{"type": "ping"}']


def run(server: Server) -> list[list[str]]:
    return [stream.result() for stream in [Stream(server, *request) for request in REQUESTS]]


@pytest.fixture(scope="module")
def mortal() -> Iterator[Server]:
    server = start()
    yield server
    assert server.stop() == 0, server.last_lines()


def test_a_worker_s_death_changes_no_event(mortal: Server) -> None:
    undisturbed = run(mortal)
    assert all(len(events) > 20 for events in undisturbed)
    assert '"type": "message_stop"' in undisturbed[0][-1]
    assert '"type": "response.' in undisturbed[2][-1]
    before = restarts(mortal)
    streams = [Stream(mortal, *request) for request in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > 10 for stream in streams) >= 3)
    os.kill(mortal.worker_groups()[0][-1], signal.SIGKILL)
    wait_for_loss(mortal, before)
    assert [stream.result() for stream in streams] == undisturbed
    wait_for_restart(mortal, before)


def test_bad_requests_change_no_event_of_other_streams(server: Server) -> None:
    expected = run(server)
    bad_requests = list(dialects())
    assert len(bad_requests) > 40
    with ThreadPoolExecutor(6) as pool:
        streams = [Stream(server, *request) for request in REQUESTS]
        answers = list(pool.map(lambda bad: ask(server, bad.path, bad.body), bad_requests))
        assert [stream.result() for stream in streams] == expected
    for bad, answer in zip(bad_requests, answers, strict=True):
        assert (answer.status, bad.message in answer.text) == (bad.status, True), f"{bad.body!r}: {answer.text}"
