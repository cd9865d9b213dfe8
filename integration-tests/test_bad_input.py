"""Bad requests get a clear error and do not affect other requests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from binary import Server


def post(server: Server, path: str, body: Any, content_type: str = "application/json") -> tuple[int, str, str]:
    """(status, content type, text)"""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers["content-type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("content-type", ""), error.read().decode()


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
    status, _, text = post(server, path, body)
    error = json.loads(text)
    assert status == 422
    assert error["error_type"] == "validation"
    assert name in error["error"]


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
    status, answered_type, text = post(server, "/generate", body, content_type)
    assert status == expected
    assert answered_type.startswith("text/plain")
    assert text


def test_unknown_adapters_are_refused_by_name(server: Server) -> None:
    status, _, text = post(server, "/generate", parameters(adapter_id="someone/adapter"))
    assert status == 422
    assert "someone/adapter" in text


def test_unknown_routes_get_404_and_wrong_methods_405(server: Server) -> None:
    assert post(server, "/nowhere", {})[0] == 404
    assert post(server, "/info", {})[0] == 405


def test_openai_routes_have_openai_errors(server: Server) -> None:
    for body in (b"{not json", json.dumps({"messages": "hi"}).encode(), json.dumps({"messages": []}).encode()):
        status, content_type, text = post(server, "/v1/chat/completions", body)
        assert 400 <= status < 500
        assert content_type.startswith("application/json")
        assert json.loads(text)["error"]["message"]


@pytest.mark.native
def test_bad_requests_during_a_stream_do_not_change_it(server: Server) -> None:
    body = {"inputs": "The quick brown fox", "parameters": {"max_new_tokens": 60}}
    alone = post(server, "/generate", body)[2]
    request = urllib.request.Request(
        server.url + "/generate_stream", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        for wrong, _ in VALIDATION:
            assert post(server, "/generate", wrong)[0] == 422
        events = [json.loads(line[5:]) for line in stream if line.startswith(b"data:")]
    assert events[-1]["generated_text"] == json.loads(alone)["generated_text"]


@pytest.mark.parametrize("penalty", [1.4e-45, 3e38])
def test_an_extreme_penalty_is_accepted(server: Server, penalty: float) -> None:
    status, _, text = post(server, "/generate", parameters(repetition_penalty=penalty))
    assert status == 200, text
