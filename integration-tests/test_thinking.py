"""Budgets of thoughts on the real binary: exact, on every route with thoughts, with drafts, grammars and tools, through
`penstock route`, and across the death of a worker."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import byte_model
import pytest
from binary import Server, paused, start
from client import ask, events
from fault.drain import ENVIRONMENT, engine_url, start_server
from fault.probe import health, metric, restarts, wait_for_restart, wait_until
from test_route import ChatStream
from test_worker_death import ranks
from tokenizers import Tokenizer

pytestmark = pytest.mark.native

# The prompt begins the thoughts unless `enable_thinking` is false.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Why?"}]
CHAT = {"messages": MESSAGES, "max_tokens": 60, "seed": 7, "logprobs": True, "return_token_ids": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
END = "</think>"
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"response_format": FORMAT},
    {"tools": [TOOL], "tool_choice": "required"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    byte_model.save(folder, 1024, None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Server]:
    running = start_server("127.0.0.1:0", "--model-id", str(folder))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[Server]:
    flags = ("--speculate", "3", "--reasoning-budget", "5")
    running = start_server("127.0.0.1:0", "--model-id", str(folder), *flags)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def router(folder: Path, plain: Server, drafting: Server) -> Iterator[Server]:
    replicas = [f"--replica={engine_url(server)}" for server in (plain, drafting)]
    flags = ("--model-id", str(folder), "--reasoning-budget", "11")
    running = start(*replicas, *flags, env=ENVIRONMENT, command=["route"])
    num_blocks = metric(plain, "penstock_kv_blocks") + metric(drafting, "penstock_kv_blocks")
    wait_until(lambda: metric(running, "penstock_kv_blocks") == num_blocks)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chat(server: Server, **fields: Any) -> Any:
    answer = ask(server, "/v1/chat/completions", {**CHAT, **fields})
    assert answer.status == 200, answer.text
    return answer.json


def num_thoughts(answer: Any) -> int:
    count: int = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return count


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_the_end_of_thoughts_is_forced_after_the_budget(plain: Server, tokenizer: Tokenizer, budget: int) -> None:
    answer = chat(plain, thinking_token_budget=budget)
    ids = answer["choices"][0]["token_ids"]
    assert ids[:budget] == chat(plain)["choices"][0]["token_ids"][:budget]
    assert tokenizer.decode(ids[budget : budget + len(END)]) == END
    assert len(ids) == answer["usage"]["completion_tokens"] == CHAT["max_tokens"]
    # The bytes of the marker before its last one are thoughts until they are known to be the marker.
    assert budget <= num_thoughts(answer) <= budget + len(END) - 1
    assert answer["choices"][0]["message"]["content"]


def test_a_budget_that_is_not_reached_changes_nothing(plain: Server) -> None:
    free, generous = (chat(plain, **fields)["choices"] for fields in ({}, {"thinking_token_budget": 500}))
    assert free == generous


def without_ids(choices: list[Any]) -> list[Any]:
    """Choices, or the deltas of a stream, without what differs each time."""
    for choice in choices:
        for call in (choice.get("message") or choice["delta"]).get("tool_calls") or ():
            call.pop("id", None)
    return choices


@pytest.mark.parametrize("fields", VARIANTS)
def test_drafts_and_a_router_change_no_token_of_a_limited_answer(
    plain: Server, drafting: Server, router: Server, fields: dict[str, Any]
) -> None:
    expected, *found = (
        without_ids(chat(server, thinking_token_budget=20, **fields)["choices"]) for server in (plain, drafting, router)
    )
    assert found == [expected, expected]


def killed_within_its_thoughts(server: Server, body: dict[str, Any]) -> list[Any]:
    """What a stream gives when the worker is killed within its thoughts."""
    while True:
        wait_until(lambda: health(server) == 200)
        before, worker = restarts(server), ranks(server)[0]
        stream = ChatStream(server, body)
        wait_until(lambda stream=stream: len(stream.chunks) > 5)
        with paused(worker):
            is_within = len(stream.chunks) < body["thinking_token_budget"] // 2
            if is_within:
                os.kill(worker, signal.SIGKILL)
        found = stream.result()
        if is_within:
            wait_for_restart(server, before)
            return without_ids(found)


@pytest.mark.parametrize("fields", VARIANTS[:2])
def test_the_death_of_a_worker_within_thoughts_changes_no_token(
    plain: Server, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    budget = 600
    body = {**CHAT, "stream": True, "thinking_token_budget": budget, "max_tokens": 700, **fields}
    undisturbed = without_ids(ChatStream(plain, body).result())
    ids = [token_id for chunk in undisturbed for token_id in chunk.get("token_ids") or ()]
    assert tokenizer.decode(ids[budget : budget + len(END)]) == END
    assert END not in tokenizer.decode(ids[:budget])
    assert killed_within_its_thoughts(plain, body) == undisturbed


def test_what_follows_the_thoughts_matches_its_grammar(plain: Server) -> None:
    answer = chat(plain, thinking_token_budget=9, response_format=FORMAT, max_tokens=200)["choices"][0]
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)
    answer = chat(
        plain, thinking_token_budget=9, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    assert answer["message"]["reasoning_content"]


def test_every_route_with_thoughts_has_a_budget(router: Server) -> None:
    message = {"model": "tgi", "max_tokens": 60, "messages": MESSAGES}
    answer = ask(router, "/v1/messages", {**message, "thinking": {"type": "enabled", "budget_tokens": 20}}).json
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert 20 <= answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 27
    response = {"model": "tgi", "max_output_tokens": 60, "input": "Why?", "reasoning": {"max_tokens": 20}}
    answer = ask(router, "/v1/responses", response).json
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert 20 <= answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= 27
    streamed = events(router, "/v1/chat/completions", {**CHAT, "thinking_token_budget": 20, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
    whole = chat(router, thinking_token_budget=20)["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]


def test_the_budget_of_the_server_that_is_asked_is_the_default(
    drafting: Server, router: Server, tokenizer: Tokenizer
) -> None:
    given: list[tuple[Server, dict[str, Any], int]] = [
        (drafting, {}, 5),
        (drafting, {"thinking_token_budget": 2}, 2),
        (router, {}, 11),
        (router, {"thinking_token_budget": 2}, 2),
    ]
    for server, fields, budget in given:
        ids = chat(server, **fields)["choices"][0]["token_ids"]
        assert tokenizer.decode(ids[budget : budget + len(END)]) == END


def test_an_answer_without_thoughts_is_not_limited(plain: Server) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat(plain, **off, thinking_token_budget=3)["choices"] == chat(plain, **off)["choices"]
    assert chat(plain, reasoning_effort="none", thinking_token_budget=3)["choices"] == chat(plain, **off)["choices"]


def test_a_developer_message_is_in_the_prompt(plain: Server) -> None:
    def prompt(*messages: dict[str, str]) -> str:
        text: str = ask(plain, "/chat_tokenize", {"messages": messages}).json["templated_text"]
        return text

    (user,) = MESSAGES
    developer = {"role": "developer", "content": "Be brief."}
    assert prompt(developer, user) == "<system>Be brief.\n<user>Why?\n<assistant><think>"
    assert prompt(user, developer) == "<user>Why?\n<system>Be brief.\n<assistant><think>"


def test_an_unknown_field_is_a_warning(plain: Server) -> None:
    answer = ask(plain, "/v1/chat/completions", {**CHAT, "max_tokens": 1, "tempreature": 0.5})
    assert answer.headers["x-penstock-warning"] == "unknown field `tempreature`; did you mean `temperature`?"
    answer = ask(plain, "/generate", {"inputs": "a", "max_tokens": 1, "parameters": {"max_new_tokens": 1}})
    assert "did you mean `parameters.max_new_tokens`?" in answer.headers["x-penstock-warning"]
    assert any("tempreature" in line for line in plain.lines)
