"""TGI's own deprecated Python client, `text-generation` 0.7, which many scripts still use."""

from __future__ import annotations

import asyncio

import pytest
from binary import Server
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

PROMPT = "The three primary colours are"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, timeout=120)


def test_plain_and_stream_agree(client: Client) -> None:
    plain = client.generate(PROMPT, max_new_tokens=12)
    events = list(client.generate_stream(PROMPT, max_new_tokens=12))
    assert plain.details.generated_tokens == 12 == len(events)
    assert [token.id for token in plain.details.tokens] == [event.token.id for event in events]
    assert events[-1].generated_text == plain.generated_text


def test_all_parameters_together_are_accepted(client: Client) -> None:
    response = client.generate(
        PROMPT,
        do_sample=True,
        max_new_tokens=8,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        return_full_text=True,
        seed=5,
        stop_sequences=["\n\n\n"],
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        truncate=50,
        typical_p=0.9,
        watermark=True,
        decoder_input_details=True,
        top_n_tokens=2,
    )
    assert response.generated_text.startswith(PROMPT)
    assert response.details.seed == 5
    # There is only one top token if sampling parameters exclude all others.
    assert all(1 <= len(top) <= 2 for top in response.details.top_tokens)


def test_best_of_returns_the_other_sequences_too(client: Client) -> None:
    response = client.generate(PROMPT, max_new_tokens=8, best_of=2, do_sample=True)
    (other,) = response.details.best_of_sequences

    def mean(tokens: list) -> float:
        return sum(token.logprob for token in tokens) / len(tokens)

    assert mean(response.details.tokens) >= mean(other.tokens)


def test_validation_errors_become_the_exception_of_the_client(client: Client) -> None:
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.generate(PROMPT, max_new_tokens=10_000_000)


def test_chat_accepts_explicit_nulls(client: Client) -> None:
    # Chat streams are not tested: the client requires `tool_calls` in every delta, which even TGI never sent.
    answer = client.chat(QUESTION, max_tokens=40, temperature=0.01, seed=1)
    assert "Tokyo" in answer.choices[0].message.content


def test_the_async_client_generates_and_streams(server: Server) -> None:
    async def both() -> tuple[str, str]:
        client = AsyncClient(server.url, timeout=120)
        plain = await client.generate(PROMPT, max_new_tokens=8)
        events = [event async for event in client.generate_stream(PROMPT, max_new_tokens=8)]
        return plain.generated_text, events[-1].generated_text

    plain, streamed = asyncio.run(both())
    assert plain
    assert plain == streamed
