"""Requests to a server without a client library."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from binary import TIMEOUT_S, Server


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    headers: dict[str, str]  # by name in lower case
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connect(server: Server, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=timeout_s)


def send(
    server: Server, path: str, body: Any = None, timeout_s: float = TIMEOUT_S, **headers: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Starts a request: a POST of bytes or of JSON, or a GET when there is no body."""
    connection = connect(server, timeout_s)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json", **headers})
    return connection, connection.getresponse()


def ask(server: Server, path: str, body: Any = None, **headers: str) -> Answer:
    """The answer to a request, whatever its status."""
    connection, response = send(server, path, body, **headers)
    answer = Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, response.read())
    connection.close()
    return answer


def events(server: Server, path: str, body: Any) -> list[dict[str, Any]]:
    """All events of a stream. Raises OSError if the request is refused."""
    answer = ask(server, path, body)
    if answer.status != 200:
        raise OSError(f"{path} answered {answer.status}: {answer.text[:300]}")
    lines = [line[5:].strip() for line in answer.body.split(b"\n") if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]
