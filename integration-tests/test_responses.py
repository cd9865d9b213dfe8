"""OpenAI's package on `/v1/responses`: answers, streams, functions, structured output and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from binary import Server, start
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
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
    server = start("--max-stored-responses", "2", "--max-total-tokens", "1024")
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


def test_a_stored_response_is_read_listed_referred_to_and_deleted(storing: Server) -> None:
    client = OpenAI(base_url=f"{storing.url}/v1", api_key="-", max_retries=0)
    first = client.responses.create(**ARGUMENTS)
    assert client.responses.retrieve(first.id).output == first.output
    (question,) = client.responses.input_items.list(first.id).data
    assert question.content[0].text == ARGUMENTS["input"]
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Why?"}]
    turns: Any = [{"role": "user", "content": ARGUMENTS["input"]}, *reference]
    referred = client.responses.input_tokens.count(model="tgi", input=turns)
    continued = client.responses.input_tokens.count(model="tgi", input="Why?", previous_response_id=first.id)
    assert referred.input_tokens == continued.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError, match="was not found"):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "SELECT [a-z]{1,9}"), ("lark", 'start: "SELECT " NAME\nNAME: /[a-z]{1,9}/')]
)
def test_a_custom_tool_is_called_with_input_that_matches_its_grammar(
    client: OpenAI, syntax: str, definition: str
) -> None:
    grammar: Any = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools: Any = [{"type": "custom", "name": "sql", "description": "Runs a query.", "format": grammar}]
    question: Any = [{"role": "user", "content": "Which tables are there?"}]
    arguments: Any = {
        "model": "tgi",
        "temperature": 0,
        "max_output_tokens": 60,
        "tools": tools,
        "parallel_tool_calls": False,
    }
    called = client.responses.create(**arguments, input=question, tool_choice={"type": "custom", "name": "sql"})
    (call,) = called.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch("SELECT [a-z]{1,9}", call.input)
    with client.responses.stream(**arguments, input=question, tool_choice="required") as stream:
        pieces = "".join(event.delta for event in stream if event.type == "response.custom_tool_call_input.delta")
    assert pieces == call.input
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "cities"}
    answer = client.responses.create(**arguments, input=[*question, *called.output, output], tool_choice="none")
    assert answer.output_text


def test_logprobs_are_those_of_the_text(client: OpenAI) -> None:
    response = client.responses.create(**ARGUMENTS, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = response.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == response.output_text
    for entry in part.logprobs:
        assert entry.token == entry.top_logprobs[0].token
        assert len(entry.top_logprobs) == 2


def test_a_compacted_conversation_goes_on(client: OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello Ada."}]
    compacted = client.responses.compact(model="tgi", input=turns)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    question: Any = {"role": "user", "content": "What is my name?"}
    again: Any = [*(item.model_dump(exclude_none=True) for item in compacted.output), question]
    assert client.responses.create(**{**ARGUMENTS, "input": again}).output_text


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(storing: Server) -> None:
    client = OpenAI(base_url=f"{storing.url}/v1", api_key="-", max_retries=0)
    turn: Any = [{"role": "user", "content": "word " * 250}, {"role": "assistant", "content": "Well."}]
    turns: Any = [*turn, *turn, *turn, *turn, *turn, {"role": "user", "content": ARGUMENTS["input"]}]
    with pytest.raises(BadRequestError, match="tokens"):
        client.responses.create(**{**ARGUMENTS, "input": turns})
    response = client.responses.create(**{**ARGUMENTS, "input": turns, "max_output_tokens": 4}, truncation="auto")
    assert response.truncation == "auto"
    assert 750 < response.usage.input_tokens < 1024
