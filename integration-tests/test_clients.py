"""Unmodified clients: huggingface_hub and openai."""

from __future__ import annotations

import asyncio

import pytest
from binary import Server
from huggingface_hub import AsyncInferenceClient, InferenceClient
from openai import BadRequestError, OpenAI, UnprocessableEntityError

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture
def hub(server: Server) -> InferenceClient:
    return InferenceClient(base_url=server.url)


@pytest.fixture
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def generation(server: Server) -> InferenceClient:
    """A client for `text_generation`, which posts to the base URL."""
    return InferenceClient(server.url)


def test_a_chat_is_answered(hub: InferenceClient) -> None:
    answer = hub.chat_completion(QUESTION, max_tokens=40, temperature=0)
    assert "Tokyo" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_text_generation_stream_equals_the_plain_answer(server: Server) -> None:
    client = generation(server)
    plain = client.text_generation("The three primary colours are", max_new_tokens=24, return_full_text=False)
    pieces = list(client.text_generation("The three primary colours are", max_new_tokens=24, stream=True))
    assert plain
    assert "".join(pieces) == plain


def test_details_of_stream_and_plain_answer_are_equal(server: Server) -> None:
    client = generation(server)
    plain = client.text_generation("Water boils at", max_new_tokens=12, details=True, return_full_text=False)
    events = list(
        client.text_generation("Water boils at", max_new_tokens=12, details=True, stream=True, return_full_text=False)
    )
    assert plain.details.finish_reason == "length"
    assert plain.details.generated_tokens == 12 == len(plain.details.tokens) == len(events)
    assert [token.id for token in plain.details.tokens] == [event.token.id for event in events]
    assert [token.logprob for token in plain.details.tokens] == pytest.approx([e.token.logprob for e in events])
    assert all(token.logprob <= 0 for token in plain.details.tokens)
    assert plain.details.seed is None
    assert events[-1].generated_text == plain.generated_text
    assert events[-1].details.input_length > 0


def test_the_seed_determines_sampled_tokens(server: Server) -> None:
    client = generation(server)

    def sample(seed: int) -> str:
        return client.text_generation("Once upon a time", max_new_tokens=24, do_sample=True, temperature=1.2, seed=seed)

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_stop_string_ends_the_text_and_stays_in_it(server: Server) -> None:
    output = generation(server).text_generation(
        "Count: one, two, three, four,", max_new_tokens=40, stop=[" six"], details=True
    )
    assert output.details.finish_reason == "stop_sequence"
    assert output.generated_text.endswith(" six")


def test_a_chat_stream_equals_the_plain_answer(hub: InferenceClient) -> None:
    plain = hub.chat_completion(QUESTION, max_tokens=40, temperature=0)
    chunks = list(
        hub.chat_completion(QUESTION, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_the_async_client_streams(server: Server) -> None:
    async def fold() -> str:
        client = AsyncInferenceClient(base_url=server.url)
        stream = await client.chat_completion(QUESTION, max_tokens=40, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert "Tokyo" in asyncio.run(fold())


def test_the_openai_sdk_chats_and_streams(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="tgi", messages=QUESTION, max_tokens=40, temperature=0)
    assert "Tokyo" in answer.choices[0].message.content
    assert answer.id
    assert answer.object == "chat.completion"
    with openai.chat.completions.create(
        model="tgi", messages=QUESTION, max_tokens=40, temperature=0, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


def test_an_openai_stop_string_is_removed_from_the_text(openai: OpenAI) -> None:
    answer = openai.completions.create(
        model="tgi", prompt="Count: one, two, three, four,", max_tokens=40, temperature=0, stop=" six"
    )
    assert answer.choices[0].finish_reason == "stop"
    assert " six" not in answer.choices[0].text


def test_an_openai_completion_stream_equals_the_plain_answer(openai: OpenAI) -> None:
    arguments = {"model": "tgi", "prompt": "The sun is", "max_tokens": 16, "temperature": 0}
    plain = openai.completions.create(**arguments)
    chunks = list(openai.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    assert plain.usage.completion_tokens == 16


def test_errors_become_the_exceptions_of_the_openai_sdk(openai: OpenAI) -> None:
    with pytest.raises((BadRequestError, UnprocessableEntityError), match="temperature"):
        openai.chat.completions.create(model="tgi", messages=QUESTION, temperature=-1)


def test_models_are_listed(openai: OpenAI) -> None:
    (model,) = openai.models.list().data
    assert openai.models.retrieve(model.id).id == model.id


def test_any_model_name_is_accepted_and_returned(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=2)
    assert answer.model == "gpt-4o"
