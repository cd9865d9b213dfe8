"""Tools through common clients: automatic, required, named and forbidden calls, and conversations with tool results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from binary import Server
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state", "maxLength": 30},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "format"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a zone",
        "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]},
    },
}
QUESTION = [{"role": "user", "content": "What is the weather like in Brooklyn, New York?"}]
ARGUMENTS: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "max_tokens": 150, "temperature": 0}


@pytest.fixture
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def check_weather(arguments: str) -> None:
    parsed = json.loads(arguments)
    assert set(parsed) == {"location", "format"}
    assert parsed["format"] in ("celsius", "fahrenheit")


def test_a_required_call_has_valid_arguments(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(**ARGUMENTS, tools=[WEATHER, TIME], tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    for call in choice.message.tool_calls:
        assert call.id
        if call.function.name == "get_current_weather":
            check_weather(call.function.arguments)
        else:
            assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "get_time"}}, "get_time"],
    ids=["object", "COMPAT: a bare name"],
)
def test_a_named_function_is_called(openai: OpenAI, choice: Any) -> None:
    answer = openai.chat.completions.create(**ARGUMENTS, tools=[WEATHER, TIME], tool_choice=choice)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_time"]


def test_tool_choice_none_prevents_calls(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(**ARGUMENTS, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_tool_choice_auto_takes_one_generation(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(**ARGUMENTS, tools=[WEATHER], tool_choice="auto")
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    assert answer.usage.completion_tokens <= 150


def test_a_streamed_call_equals_the_plain_one(openai: OpenAI) -> None:
    plain = openai.chat.completions.create(**ARGUMENTS, tools=[WEATHER], tool_choice="required")
    name, arguments, finish = "", "", None
    for chunk in openai.chat.completions.create(**ARGUMENTS, tools=[WEATHER], tool_choice="required", stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.index == 0:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
    expected = plain.choices[0].message.tool_calls[0].function
    assert (name, arguments, finish) == (expected.name, expected.arguments, "tool_calls")


def test_a_conversation_continues_after_a_tool_result(openai: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_time", "content": "12:30"},
    ]
    answer = openai.chat.completions.create(
        model="tgi", messages=messages, tools=[TIME], tool_choice="none", max_tokens=40, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 20


def test_the_sdk_parses_structured_answers(openai: OpenAI) -> None:
    class Person(BaseModel):
        name: str
        is_adult: bool

    answer = openai.chat.completions.parse(
        model="tgi",
        messages=[{"role": "user", "content": "Invent a person with a short name."}],
        response_format=Person,
        max_tokens=100,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_hub_client_calls_tools(server: Server) -> None:
    client = InferenceClient(base_url=server.url)
    answer = client.chat_completion(QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=150, temperature=0)
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_current_weather"
    check_weather(call.function.arguments)


def test_hub_client_keeps_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}
    client = InferenceClient(base_url=server.url)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for response_format in (
        {"type": "json", "value": schema},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    ):
        answer = client.chat_completion(question, response_format=response_format, max_tokens=60, temperature=0)
        assert set(json.loads(answer.choices[0].message.content)) >= {"capital"}


def test_an_unknown_function_is_refused(server: Server) -> None:
    client = InferenceClient(base_url=server.url)
    with pytest.raises(HfHubHTTPError, match="no_such"):
        client.chat_completion(
            QUESTION, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "no_such"}}
        )


def test_an_error_of_the_grammar_engine_names_the_function(openai: OpenAI) -> None:
    impossible = {"type": "object", "properties": {"day": {"type": "integer", "minimum": 5, "maximum": 2}}}
    broken = {"type": "function", "function": {"name": "later", "parameters": impossible | {"required": ["day"]}}}
    with pytest.raises(
        BadRequestError, match='parameters of the function "later" cannot be used: Unsatisfiable'
    ) as error:
        openai.chat.completions.create(**ARGUMENTS, tools=[TIME, broken], tool_choice="required")
    assert error.value.param == "tools"


def test_results_of_functions_and_messages_of_other_roles_are_shown(openai: OpenAI) -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "get_time", "arguments": "{}"}}
    result = {"role": "function", "name": "get_time", "content": "It is noon in every zone of the world."}

    def num_tokens(*messages: dict[str, Any]) -> int:
        answer = openai.chat.completions.create(**ARGUMENTS | {"messages": [*QUESTION, *messages], "max_tokens": 1})
        return answer.usage.prompt_tokens

    assert num_tokens(call, result) > num_tokens(call) + 7
    assert num_tokens({"role": "bot", "content": "It is noon in every zone of the world."}) > num_tokens() + 7
