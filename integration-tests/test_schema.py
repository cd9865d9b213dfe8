"""The server conforms to its OpenAPI document for requests generated from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis.checks import CheckContext, not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

DOCUMENT = "/api-doc/openapi.json"
# Upper bounds, so that the time goes into many requests and not into many tokens.
LARGEST = {
    "max_new_tokens": 2,
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "min_tokens": 2,
    "n": 2,
    "best_of": 2,
}
# The field that identifies a kind of request, and the field that limits its length.
LENGTH_OF = {
    "inputs": "max_new_tokens",
    "messages": "max_tokens",
    "prompt": "max_tokens",
    "input": "max_output_tokens",
}


def short(value: Any) -> Any:
    """The same request for a few tokens, without a timeout too short for them."""
    if isinstance(value, list):
        return [short(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: short(item) for key, item in value.items()}
    for key, largest in LARGEST.items():
        if isinstance(value.get(key), int | float) and value[key] > largest:
            value[key] = largest
    if isinstance(value.get("timeout"), int | float) and 0 < value["timeout"] < 60:
        value["timeout"] = 60
    for marker, length in LENGTH_OF.items():
        if marker in value:
            if marker == "inputs" and value.get("parameters") is None:
                value["parameters"] = {}
            where = value["parameters"] if marker == "inputs" else value
            if isinstance(where, dict) and where.get("max_completion_tokens") is None and where.get(length) is None:
                where[length] = 2
    return value


def no_server_error(ctx: CheckContext, response: Response, case: schemathesis.Case) -> None:
    """No request gets a server error."""
    # As in TGI, `/vertex` answers "Incomplete generation" if any of its requests fails.
    if case.path == "/vertex" and response.status_code == 500:
        assert response.json() == {"error": "Incomplete generation", "error_type": "Incomplete generation"}
        return
    not_a_server_error(ctx, response, case)


def body_conforms(ctx: CheckContext, response: Response, case: schemathesis.Case) -> None:
    """The body, or each event of a stream, has the documented schema or is an error."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        response_schema_conformance(ctx, response, case)
        return
    document = case.operation.schema.raw_schema
    described = document["paths"][case.path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    errors = [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "OpenAiError", "AnthropicError")]
    validator = Draft202012Validator({"anyOf": [described, *errors], "components": document["components"]})
    lines = response.content.decode().split("\n")  # not by what else Unicode calls the end of a line
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events
    for event in events:
        if event != "[DONE]":
            validator.validate(json.loads(event))


CHECKS = [
    no_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    body_conforms,
]


def check_answers(operation: schemathesis.APIOperation, mode: GenerationMode, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.body = short(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


# The routes that answer on a server of a model that pools; the others say what the model is for.
POOLING = {
    "encoder": {"/", "/embed", "/v1/embeddings", "/tokenize"},
    "reranker": {"/rerank", "/v1/rerank"},
}


@pytest.mark.parametrize("name", ["server", *POOLING])
def test_every_response_conforms_to_the_document(
    name: str, request: pytest.FixtureRequest, subtests: pytest.Subtests
) -> None:
    served = request.getfixturevalue(name)
    server = served.server if name in POOLING else served
    api = schemathesis.openapi.from_url(server.url + DOCUMENT)
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        num_examples = 15 if name not in POOLING else 6 if operation.path in POOLING[name] else 1
        # Valid requests, then invalid ones.
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            if mode == GenerationMode.NEGATIVE and operation.method == "get":
                continue
            with subtests.test(operation=operation.label, mode=mode.name):
                check_answers(operation, mode, num_examples)


def test_schemas_and_examples_of_the_document_are_valid(document: Any) -> None:
    for name, described in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(described)
        validator = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})
        for example in [*described.get("examples", []), *([described["example"]] if "example" in described else [])]:
            validator.validate(example)
