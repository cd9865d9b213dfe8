"""A restart restores a sequence's state beyond its tokens: grammars, stop strings, penalties, watermarks, prompt
logprobs and several choices. Clients get the same bytes as from an undisturbed server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from binary import Server, start
from client import ask
from fault.probe import health, metrics, restarts, wait_for_loss, wait_for_restart, wait_until
from test_worker_death import ranks

pytestmark = [pytest.mark.slow, pytest.mark.native]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4, "maxItems": 8},
        "age": {"type": "integer"},
    },
    "required": ["name", "tags", "age"],
}
TOOL = {"type": "function", "function": {"name": "save_person", "description": "Saves.", "parameters": SCHEMA}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me of a person."}], "max_tokens": 120, "seed": 3}


def generate(prompt: str, **parameters: object) -> tuple[str, dict]:
    return "/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 100, "seed": 5, **parameters}}


REQUESTS = {
    "schema": generate("A person as JSON:", grammar={"type": "json", "value": SCHEMA}, do_sample=True),
    "regex": generate("Numbers:", grammar={"type": "regex", "value": "([0-9]{2,5}, ){12}[0-9]+"}),
    "stop": generate("1, 2, 3, 4, 5, 6,", stop=["24,", "nowhere"]),
    "penalties": generate("Once upon a time", repetition_penalty=1.3, frequency_penalty=0.5, do_sample=True),
    "watermark": generate("The river", watermark=True, do_sample=True, temperature=0.8),
    "prompt logprobs": generate("The capital of France is Paris. " * 30, decoder_input_details=True, top_n_tokens=3),
    "n": ("/v1/chat/completions", {**CHAT, "n": 3, "temperature": 1.0, "logprobs": True, "top_logprobs": 2}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
}
VOLATILE = ("id", "created", "prompt_tokens_details")  # differ between answers; the last depends on the prefix cache


def reproducible(server: Server, name: str) -> Any:
    """The part of the answer to REQUESTS[name] that is equal in every run."""
    answer = ask(server, *REQUESTS[name])
    assert answer.status == 200, answer.text
    return anonymous(answer.json)


def anonymous(value: Any) -> Any:
    """An answer without the fields that differ between any two answers."""
    if isinstance(value, dict):
        return {key: anonymous(inner) for key, inner in value.items() if key not in VOLATILE}
    return [anonymous(inner) for inner in value] if isinstance(value, list) else value


def ask_all(server: Server) -> tuple[dict[str, Any], list[threading.Thread]]:
    answers: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            answers[name] = reproducible(server, name)
        except Exception as error:  # noqa: BLE001 - the assertion reports it with the end of the log
            answers[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in REQUESTS]
    for thread in threads:
        thread.start()
    return answers, threads


@pytest.fixture(scope="module")
def mortal() -> Iterator[Server]:
    server = start("--enable-prefill-logprobs", "--num-shard", "2")
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def undisturbed(mortal: Server) -> dict[str, Any]:
    return {name: reproducible(mortal, name) for name in REQUESTS}


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_restart_changes_no_answer(mortal: Server, undisturbed: dict[str, Any], share: float) -> None:
    before, tokens = restarts(mortal), steps(mortal)
    answers, threads = ask_all(mortal)
    wait_until(lambda: steps(mortal) >= tokens + 100 * share)
    os.kill(ranks(mortal)[0], signal.SIGKILL)
    wait_for_loss(mortal, before)
    for thread in threads:
        thread.join()
    assert answers == undisturbed, mortal.last_lines()
    wait_for_restart(mortal, before)
    wait_until(lambda: health(mortal) == 200)


def steps(server: Server) -> float:
    """Number of steps so far."""
    return sum(value for name, value in metrics(server).items() if name.startswith("tgi_batch_inference_count"))
