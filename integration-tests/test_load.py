"""Concurrency: 64 streams, disconnects, overload, and two ranks."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from binary import Server, start
from client import ask, connect, send
from fault.probe import metrics, wait_for_rest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from openai import OpenAI

PROMPTS = [f"Fact number {n}: the" for n in range(64)]


def test_each_of_64_concurrent_streams_ends_exactly_once(server: Server) -> None:
    async def one(client: AsyncInferenceClient, prompt: str, tokens: int) -> list:
        stream = await client.text_generation(prompt, max_new_tokens=tokens, stream=True, details=True)
        return [event async for event in stream]

    async def all_streams() -> list[list]:
        client = AsyncInferenceClient(server.url)
        return await asyncio.gather(*(one(client, p, 8 + n % 24) for n, p in enumerate(PROMPTS)))

    for n, events in enumerate(asyncio.run(all_streams())):
        finals = [event for event in events if event.generated_text is not None]
        assert len(finals) == 1
        assert finals[0] is events[-1]
        assert [event.index for event in events] == list(range(1, len(events) + 1))
        assert len(events) == 8 + n % 24 or finals[0].details.finish_reason == "eos_token"


def test_disconnected_clients_free_their_blocks(server: Server) -> None:
    wait_for_rest(server)
    for n in range(20):
        connection = connect(server)
        body = json.dumps({"inputs": f"Story {n}: " + "word " * 200, "parameters": {"max_new_tokens": 500}})
        connection.request("POST", "/generate_stream", body, {"content-type": "application/json"})
        if n % 2:
            connection.getresponse().readline()
        connection.close()
    wait_for_rest(server)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    running = start("--num-shard", "2")
    yield running
    assert running.stop() == 0


@pytest.mark.native
def test_two_ranks_give_the_tokens_of_one(server: Server, two_ranks: Server) -> None:
    for prompt in ("The capital of Italy is", "def fibonacci(n):", "Once upon a time"):
        texts = [InferenceClient(s.url).text_generation(prompt, max_new_tokens=24) for s in (server, two_ranks)]
        assert texts[0] == texts[1]


def listening_addresses(pid: int) -> list[str]:
    """IPv4 and IPv6 addresses on which a process accepts TCP connections, in the hexadecimal form of /proc/net/tcp."""
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_workers_accept_tcp_connections_on_the_loopback_interface_only(two_ranks: Server) -> None:
    ranks = two_ranks.worker_groups()[0]
    addresses = [address for pid in ranks for address in listening_addresses(pid)]
    assert addresses, "ranks on a CPU exchange tensors over TCP, so they listen"
    assert set(addresses) == {"0100007F"}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """One running request, one in the queue, and a short queue timeout."""
    running = start("--max-concurrent-requests", "2", "--max-batch-size", "1", "--queue-timeout", "3")
    yield running
    assert running.stop() == 0


def test_refused_clients_retry_after_the_stated_delay(small: Server) -> None:
    """PERF: the first test of this server, whose delay is a second as long as no request has ended; later, up to a
    minute."""
    body = {"inputs": "A long story:", "parameters": {"max_new_tokens": 4000, "ignore_eos": True}}
    connection, occupant = send(small, "/generate_stream", body)
    occupant.readline()
    asked: list[float] = []
    answered: list[tuple[float, int, str | None]] = []

    def on_answer(response: httpx.Response) -> None:
        answered.append((time.monotonic(), response.status_code, response.headers.get("retry-after")))
        occupant.close()
        connection.close()

    hooks = {"request": [lambda _: asked.append(time.monotonic())], "response": [on_answer]}
    with httpx.Client(event_hooks=hooks) as transport:
        client = OpenAI(base_url=f"{small.url}/v1", api_key="-", max_retries=9, http_client=transport)
        chunks = client.chat.completions.create(
            model="tgi", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    *refusals, last = answered
    assert refusals
    assert {status for _, status, _ in refusals} == {429}, (
        "the request was refused while it was queued, before its stream began"
    )
    assert last[1] == 200
    for (refused_at, _, retry_after_s), asked_again_at in zip(refusals, asked[1:], strict=True):
        assert retry_after_s is not None
        assert 1 <= int(retry_after_s) <= 60
        assert asked_again_at - refused_at >= int(retry_after_s)
    assert metrics(small)["penstock_queue_tokens"] == 0


def test_overload_gets_429_with_its_error_type(small: Server) -> None:
    def one(_: int) -> tuple[int, str]:
        answer = ask(small, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 64}})
        if answer.status == 200:
            return 200, ""
        return answer.status if int(answer.headers["retry-after"]) > 0 else 0, answer.json["error_type"]

    with ThreadPoolExecutor(8) as clients:
        answers = set(clients.map(one, range(8)))
    assert answers == {(200, ""), (429, "overloaded")}


@pytest.mark.parametrize("prompt_words", [1, 900])
def test_tokenize_counts_the_tokens_that_generation_reports(server: Server, prompt_words: int) -> None:
    prompt = "word " * prompt_words
    tokens = ask(server, "/tokenize", {"inputs": prompt}).json
    client = InferenceClient(server.url)
    events = list(client.text_generation(prompt, max_new_tokens=1, details=True, stream=True))
    assert events[-1].details.input_length == len(tokens)
