"""Bad requests get a clear error and do not affect other requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from binary import Server
from client import ask, send


def parameters(**values: Any) -> dict[str, Any]:
    return {"inputs": "Hello", "parameters": {"max_new_tokens": 4, **values}}


VALIDATION = [
    ({"inputs": ""}, "empty"),
    (parameters(temperature=0), "temperature"),
    (parameters(temperature=-3.5), "temperature"),
    (parameters(repetition_penalty=0), "repetition_penalty"),
    (parameters(top_p=0), "top_p"),
    (parameters(top_p=1.5), "top_p"),
    (parameters(top_k=0), "top_k"),
    (parameters(max_new_tokens=0), "max_new_tokens"),
    (parameters(max_new_tokens=1_000_000), "max_new_tokens"),
    (parameters(truncate=0), "truncate"),
    (parameters(stop=["a", "b", "c", "d", "e"]), "stop"),
    ({"inputs": "word " * 20_000}, "tokens"),
]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(("body", "name"), VALIDATION, ids=lambda value: str(value)[:40])
def test_a_validation_error_names_the_parameter(server: Server, path: str, body: Any, name: str) -> None:
    answer = ask(server, path, body)
    assert answer.status == 422
    assert answer.json["error_type"] == "validation"
    assert name in answer.json["error"]


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (b"{not json", "application/json", 400),
        (b"\xff\xfe\x00", "application/json", 400),
        (b"{}", "application/json", 422),
        (b'{"inputs": 5}', "application/json", 422),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}', "application/json", 422),
        (b'{"inputs": "a", "parameters": null}', "application/json", 422),
        (b'{"inputs": "a"}', "text/plain", 415),
        (b'{"inputs": "' + b"a" * 2_100_000 + b'"}', "application/json", 413),
        (b'{"inputs": "a", "unknown": ' + b"[" * 100_000, "application/json", 400),
    ],
    ids=["syntax", "not utf-8", "missing", "type", "negative", "null", "content type", "too large", "deep"],
)
def test_malformed_bodies_get_the_status_of_tgi(server: Server, body: bytes, content_type: str, expected: int) -> None:
    answer = ask(server, "/generate", body, **{"content-type": content_type})
    assert answer.status == expected
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text


def test_unknown_adapters_are_refused_by_name(server: Server) -> None:
    answer = ask(server, "/generate", parameters(adapter_id="someone/adapter"))
    assert answer.status == 422
    assert "someone/adapter" in answer.text


def test_unknown_routes_get_404_and_wrong_methods_405(server: Server) -> None:
    assert ask(server, "/nowhere", {}).status == 404
    assert ask(server, "/info", {}).status == 405


def test_openai_routes_have_openai_errors(server: Server) -> None:
    for body in (b"{not json", {"messages": "hi"}, {"messages": []}):
        answer = ask(server, "/v1/chat/completions", body)
        assert 400 <= answer.status < 500
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.json["error"]["message"]


@pytest.mark.native
def test_bad_requests_during_a_stream_do_not_change_it(server: Server) -> None:
    body = {"inputs": "The quick brown fox", "parameters": {"max_new_tokens": 60}}
    alone = ask(server, "/generate", body).json
    connection, stream = send(server, "/generate_stream", body)
    for wrong, _ in VALIDATION:
        assert ask(server, "/generate", wrong).status == 422
    events = [json.loads(line[5:]) for line in stream if line.startswith(b"data:")]
    connection.close()
    assert events[-1]["generated_text"] == alone["generated_text"]


@pytest.mark.parametrize("penalty", [1.4e-45, 3e38])
def test_an_extreme_penalty_is_accepted(server: Server, penalty: float) -> None:
    answer = ask(server, "/generate", parameters(repetition_penalty=penalty))
    assert answer.status == 200, answer.text
