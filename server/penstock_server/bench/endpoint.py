"""The routes that can be measured: how AIPerf calls each, and a request that shows whether a server has it."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60
API_KEY = "OPENAI_API_KEY"  # AIPerf reads it, too


class BenchError(Exception):
    """Why nothing can be measured, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route. reports_usage: AIPerf finds the number of tokens in the answer; otherwise it tokenizes the answer."""

    path: str
    aiperf_type: str
    body: Callable[[str, str], dict[str, Any]]  # model, text → the request of one token
    reports_usage: bool = True


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ENDPOINTS = {
    "chat": Endpoint(
        "/v1/chat/completions",
        "chat",
        lambda model, text: {"model": model, "messages": _messages(text), "max_tokens": 1},
    ),
    "completions": Endpoint(
        "/v1/completions", "completions", lambda model, text: {"model": model, "prompt": text, "max_tokens": 1}
    ),
    "generate": Endpoint(
        "/generate_stream",
        "huggingface-generate",
        lambda _, text: {"inputs": text, "parameters": {"max_new_tokens": 1}},
        reports_usage=False,
    ),
    # AIPerf reads the usage of `response.completed`; an answer that reaches its limit ends in `response.incomplete`.
    "responses": Endpoint(
        "/v1/responses",
        "responses",
        lambda model, text: {"model": model, "input": text, "max_output_tokens": 1},
        reports_usage=False,
    ),
    "messages": Endpoint(
        "/v1/messages", "messages", lambda model, text: {"model": model, "messages": _messages(text), "max_tokens": 1}
    ),
}


def model_of(url: str) -> str:
    """The model that a server names first. Raises BenchError if no server answers, or if it names none."""
    status, body = _ask(f"{url}/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
        raise BenchError(f"{url}/v1/models names no model; it answered {status}: {text!r}") from None


def try_out(url: str, name: str, model: str, extra: dict[str, Any]) -> None:
    """Sends one small request. Raises BenchError unless the server answers it."""
    endpoint = ENDPOINTS[name]
    body = endpoint.body(model, "Hello")
    (body["parameters"] if name == "generate" else body).update(extra)
    status, answer = _ask(url + endpoint.path, body)
    if status in (404, 405):
        others = ", ".join(other for other in ENDPOINTS if other != name)
        raise BenchError(f"{url} has no route {endpoint.path} ({status}); try --endpoint with one of: {others}")
    if status in (401, 403):
        raise BenchError(f"{url}{endpoint.path} needs an API key ({status}): set {API_KEY} in the environment")
    if status != 200:
        hint = "; if it does not know ignore_eos, add --stop-at-eos" if "ignore_eos" in extra else ""
        text = answer[:300].decode(errors="replace")
        raise BenchError(f"{url}{endpoint.path} answered {status}: {text}{hint}")


def _ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST if there is a body. Raises BenchError if nothing answers."""
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    if key := os.environ.get(API_KEY):
        headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - the scheme is checked
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise BenchError(f"no server answers at {url}: {reason}; start one, or name another with --url") from None
