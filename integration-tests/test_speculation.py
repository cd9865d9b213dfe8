"""`--speculate` on the real binary: the bits of a server without it, in fewer steps, also across a worker's death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from binary import Server, start
from client import ask, send
from fault.probe import metric

pytestmark = pytest.mark.native

CODE = "def add(first, second):\n    total = first + second\n    return total\n\n"
COPY = f"Repeat the code exactly.\n\n{CODE * 3}"
LIST = "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"
SCHEMA = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "second": {"type": "string"}, "total": {"enum": ["small", "large"]}},
    "required": ["first", "second", "total"],
    "additionalProperties": False,
}
GREEDY = {"inputs": COPY, "parameters": {"max_new_tokens": 60, "details": True, "top_n_tokens": 2}}
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 1, "temperature": 0.6},
    {"do_sample": True, "seed": 2, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    {"do_sample": True, "seed": 3, "typical_p": 0.9, "watermark": True},
    {"repetition_penalty": 1.2},
    {"do_sample": True, "seed": 4, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"stop": ["total", "\n\n"], "min_tokens": 5},
    {"logit_bias": {"28": 3.0}, "top_n_tokens": 3},
    {"grammar": {"type": "regex", "value": "[0-9, ]{20,40}"}},
    {"grammar": {"type": "json", "value": SCHEMA}, "repetition_penalty": 1.1, "top_n_tokens": 2},
    {"grammar": {"type": "json", "value": SCHEMA}, "do_sample": True, "seed": 5},
]
REQUESTS = [GREEDY] + [
    {"inputs": inputs, "parameters": {"max_new_tokens": 40, "details": True, **parameters}}
    for inputs in (COPY, LIST)
    for parameters in PARAMETERS
]


@pytest.fixture(scope="module")
def speculating() -> Iterator[Server]:
    server = start("--speculate", "8", "--max-batch-total-tokens", "8000")
    yield server
    assert server.stop() == 0


def answer(server: Server, request: dict[str, Any]) -> Any:
    """The text and its details, which a server without drafts must equal."""
    found = ask(server, "/generate", request).json
    found["details"].pop("draft_tokens", None)
    return found["generated_text"], found["details"]


def test_answers_are_the_bits_of_a_server_without_drafts(server: Server, speculating: Server) -> None:
    expected = [answer(server, request) for request in REQUESTS]
    assert [answer(speculating, request) for request in REQUESTS] == expected
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda request: answer(speculating, request), REQUESTS))
    assert together == expected


def test_every_right_draft_saves_a_step(speculating: Server) -> None:
    """How many there are depends on the times of steps, which decide how many drafts pay."""
    names = 'tgi_batch_inference_success{method="decode"}', "penstock_draft_tokens", "penstock_accepted_draft_tokens"
    before = [metric(speculating, name) for name in names]
    details = ask(speculating, "/generate", GREEDY).json["details"]
    steps, drafts, accepted = (metric(speculating, name) - old for name, old in zip(names, before, strict=True))
    assert details["generated_tokens"] == 60
    assert 0 < accepted <= drafts
    assert details["draft_tokens"] == {"verified": drafts, "accepted": accepted}
    assert steps + accepted <= 62  # the step that ended the request before may be counted late


def test_a_worker_s_death_changes_no_token(speculating: Server) -> None:
    request = {"inputs": COPY, "parameters": {"max_new_tokens": 200, "details": True, "do_sample": True, "seed": 9}}
    _, details = answer(speculating, request)
    connection, response = send(speculating, "/generate_stream", request)
    tokens: list[Any] = []
    for line in response:
        if line.startswith(b"data:"):
            tokens.append(json.loads(line[5:])["token"])
            if len(tokens) == 20:  # once: an empty line follows
                os.kill(speculating.worker_pids()[0], signal.SIGKILL)
    connection.close()
    assert tokens == details["tokens"]
