"""OpenAI's package on `/v1/responses`: answers, streams, functions, structured output and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from binary import Server, start
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel

ARGUMENTS: Any = {"model": "tgi", "input": "What is the capital of Japan?", "temperature": 0, "max_output_tokens": 60}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather at a place",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["place", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def test_a_question_is_answered(client: OpenAI) -> None:
    response = client.responses.create(**ARGUMENTS, instructions="You answer briefly.", metadata={"a": "b"})
    assert "Tokyo" in response.output_text
    assert (response.status, response.metadata, response.store) == ("completed", {"a": "b"}, False)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_stream_equals_the_plain_answer(client: OpenAI) -> None:
    plain = client.responses.create(**ARGUMENTS)
    with client.responses.stream(**ARGUMENTS) as stream:
        pieces = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert pieces == plain.output_text == final.output_text
    assert final.usage.output_tokens == plain.usage.output_tokens


def test_the_async_client_streams(server: Server) -> None:
    async def fold() -> str:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            stream = await client.responses.create(**ARGUMENTS, stream=True)
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert "Tokyo" in asyncio.run(fold())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_function_is_called_and_its_output_read(client: OpenAI, choice: Any) -> None:
    question: Any = [{"role": "user", "content": "What is the weather like in Oslo?"}]
    arguments: Any = {"model": "tgi", "temperature": 0, "max_output_tokens": 100, "tools": [WEATHER]}
    called = client.responses.create(**arguments, input=question, tool_choice=choice)
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    for call in calls:
        assert set(json.loads(call.arguments)) == {"place", "unit"}
    with client.responses.stream(**arguments, input=question, tool_choice=choice) as stream:
        streamed = stream.get_final_response()
    assert [item.arguments for item in streamed.output] == [item.arguments for item in called.output]

    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"} for call in calls]
    answer = client.responses.create(**arguments, input=[*question, *called.output, *outputs], tool_choice="none")
    assert answer.output_text


def test_the_package_parses_structured_answers(client: OpenAI) -> None:
    class Person(BaseModel):
        name: str
        is_adult: bool

    question = "Invent a person with a short name."
    response = client.responses.parse(
        model="tgi", input=question, text_format=Person, temperature=0, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Person)


def test_an_answer_that_is_cut_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(**{**ARGUMENTS, "max_output_tokens": 3})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_refusals_become_the_exceptions_of_the_package(client: OpenAI) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    with pytest.raises(BadRequestError, match="images are not supported") as error:
        client.responses.create(**{**ARGUMENTS, "input": image})
    assert error.value.param == "input[0].content[0].image_url"
    with pytest.raises(BadRequestError, match="--max-stored-responses"):
        client.responses.create(**ARGUMENTS, previous_response_id="resp_0")


@pytest.fixture(scope="module")
def storing() -> Iterator[Server]:
    server = start("--max-stored-responses", "2")
    yield server
    assert server.stop() == 0


def test_the_newest_responses_can_be_continued(storing: Server) -> None:
    client = OpenAI(base_url=f"{storing.url}/v1", api_key="-", max_retries=0)
    question = "What is the capital of Japan?"
    first = client.responses.create(**ARGUMENTS)
    assert first.store
    follow_up = "And of France?"
    second = client.responses.create(**{**ARGUMENTS, "input": follow_up}, previous_response_id=first.id)
    turns: Any = [{"role": "user", "content": question}, *first.output, {"role": "user", "content": follow_up}]
    whole = client.responses.create(**{**ARGUMENTS, "input": turns}, store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    client.responses.create(**ARGUMENTS)
    with pytest.raises(BadRequestError, match="was not found"):
        client.responses.create(**ARGUMENTS, previous_response_id=first.id)
