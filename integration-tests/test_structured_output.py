"""Schemas as pydantic and zod write them: what they say is enforced, refused by name, or named in a header."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from binary import Server
from client import Answer, ask
from jsonschema import Draft202012Validator
from pydantic import Base64Bytes, BaseModel, SecretStr

WARNING = "x-penstock-warning"
QUESTION = [{"role": "user", "content": "Answer with a short JSON value."}]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Annotated(BaseModel):
    """Keywords that are annotations, or that say nothing."""

    path: Path
    secret: SecretStr
    content: Base64Bytes
    counts: dict[Colour, int]


# What zod 4 writes for an object with z.record(z.string(), z.int()), z.base64() and z.record(z.enum(["a"]), z.null()).
ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "names": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        },
        "data": {
            "type": "string",
            "format": "base64",
            "contentEncoding": "base64",
            "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
        },
        "by": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a"]},
            "additionalProperties": {"type": "null"},
            "required": ["a"],
        },
    },
    "required": ["names", "data", "by"],
    "additionalProperties": False,
}


def chat(server: Server, **fields: Any) -> Answer:
    return ask(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 200, "temperature": 0, **fields})


def with_schema(server: Server, schema: Any, strict: bool | None = None, **fields: Any) -> Answer:
    named = {"name": "answer", "schema": schema, **({} if strict is None else {"strict": strict})}
    return chat(server, response_format={"type": "json_schema", "json_schema": named}, **fields)


def value(answer: Answer) -> Any:
    assert answer.status == 200, answer.text
    return json.loads(answer.json["choices"][0]["message"]["content"])


def required_call(parameters: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "use", "description": "Use it.", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required", **fields}


def arguments(answer: Answer) -> Any:
    assert answer.status == 200, answer.text
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("schema", [Annotated.model_json_schema(), ZOD], ids=["pydantic", "zod"])
def test_annotations_are_no_reason_to_refuse_a_strict_schema(server: Server, schema: dict[str, Any]) -> None:
    answer = with_schema(server, schema, strict=True, max_tokens=1)
    assert answer.status == 200, answer.text
    assert WARNING not in answer.headers


def test_what_is_not_enforced_is_refused_if_strict_and_otherwise_named_in_a_header(server: Server) -> None:
    class Tags(BaseModel):
        tags: set[bool]

    schema = Tags.model_json_schema()
    refused = with_schema(server, schema, strict=True)
    assert refused.status == 400
    assert "`uniqueItems` at `/properties/tags` cannot be enforced" in refused.text
    for strict in (False, None):
        answer = with_schema(server, schema, strict=strict, max_tokens=1)
        assert (answer.status, answer.headers[WARNING]) == (
            200,
            "`uniqueItems` at `/properties/tags` is not enforced",
        )
    streamed = chat(server, **required_call(schema, stream=True, max_tokens=1))
    assert streamed.status == 200
    assert streamed.headers[WARNING] == (
        'the parameters of the function "use": `uniqueItems` at `/properties/tags` is not enforced'
    )
    grammar = {"type": "json", "value": schema}
    tgi = ask(server, "/generate", {"inputs": "Hi", "parameters": {"grammar": grammar, "max_new_tokens": 1}})
    assert tgi.status == 422
    assert "`uniqueItems` at `/properties/tags`" in tgi.text


@pytest.mark.parametrize("number", [9007199254740992, -9007199254740994, 9223372036854775807, 10**22])
def test_large_integers_are_exact(server: Server, number: int) -> None:
    assert value(with_schema(server, {"const": number})) == number
    properties = {"id": {"enum": [number]}}
    assert arguments(chat(server, **required_call({"properties": properties, "required": ["id"]}))) == {"id": number}


@pytest.mark.parametrize(
    "keywords",
    [
        {"const": 9007199254740993},
        {"enum": [123456789012345678901234567890]},
        {"type": "integer", "minimum": 1234567890123456789, "maximum": 1234567890123456789},
        {"type": "number", "multipleOf": 0.07000000000000000001},
    ],
)
def test_integers_that_would_change_are_refused_by_name(server: Server, keywords: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"id": keywords}, "required": ["id"]}
    name = next(name for name in keywords if name != "type")
    text = json.dumps(schema).replace("0.07,", "0.07000000000000000001,").replace("0.07}", "0.07000000000000000001}")
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "SCHEMA"}}},
        required_call("SCHEMA"),
        {"guided_json": "SCHEMA"},
    ):
        raw = json.dumps({"messages": QUESTION, **body}).replace('"SCHEMA"', text)
        refused = ask(server, "/v1/chat/completions", raw.encode())
        assert refused.status in (400, 422), refused.text
        assert f"`{name}`" in refused.text
        assert "too many digits" in refused.text


def test_bounds_of_64_bits_work(server: Server) -> None:
    int64 = {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}
    schema = {"type": "object", "properties": {"id": int64}, "required": ["id"]}
    for answer in (value(with_schema(server, schema, strict=True)), arguments(chat(server, **required_call(schema)))):
        assert -(2**63) <= answer["id"] < 2**63


def test_a_schema_beside_json_object_is_enforced(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]}
    for response_format in ({"type": "json_object", "schema": schema}, {"type": "json_schema", "schema": schema}):
        assert value(chat(server, response_format=response_format)) == {"a": 5}


def test_properties_mean_a_closed_object(server: Server) -> None:
    """TGI's documentation has such a schema."""
    short = {"type": "string", "maxLength": 8}
    schema = {"properties": {"location": short, "animals": {"properties": {"n": {"enum": [1]}}, "required": ["n"]}}}
    schema["required"] = ["location", "animals"]
    other = {"allOf": [{"$ref": "#/$defs/place"}, {"properties": {"b": {"enum": [2]}}, "required": ["b"]}]}
    other["$defs"] = {"place": {"properties": {"a": {"enum": [1]}}, "required": ["a"]}}
    for given, keys in ((schema, {"location", "animals"}), (other, {"a", "b"})):
        parameters = {"grammar": {"type": "json", "value": given}, "max_new_tokens": 100}
        answer = ask(server, "/generate", {"inputs": "Where?", "parameters": parameters})
        made = json.loads(answer.json["generated_text"])
        assert set(made) == keys
        Draft202012Validator(given).validate(made)


def test_stop_strings_end_content_only(server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    for stream in (False, True):
        answer = chat(server, **required_call(schema, stop=["city", "Rome"], stream=stream))
        assert answer.status == 200, answer.text
        if not stream:
            assert arguments(answer) == {"city": "Rome"}
            assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
    content = chat(server, response_format={"type": "choice", "value": ["the city of Rome"]}, stop=["city"])
    choice = content.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("the ", "stop")


def test_errors_of_a_grammar_come_before_the_stream(server: Server) -> None:
    optional = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(5000)}}
    for response_format in (
        {"type": "regex", "value": "a{1000000}"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": optional}},
    ):
        refused = chat(server, response_format=response_format, stream=True)
        assert refused.status == 400, refused.text
        assert "cannot be used" in refused.text
    refused = chat(server, **required_call(optional, stream=True))
    assert refused.status in (400, 422)
    assert '"use' in refused.json["error"]["message"]
