"""HTTP requests to one server on its unix socket, with a bound on the requests in flight."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from penstock.errors import PenstockError, RequestError, StoppedError
from penstock.process import ServerProcess

_DATA = "data: "
_END = "[DONE]"
_HEADERS = {"content-type": "application/json"}
# Made once: reading the certificates for each connection would take longer than connecting.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Client:
    """Sends requests to a server. At most `max_in_flight` are in flight; the others wait here in their order."""

    def __init__(self, process: ServerProcess, max_in_flight: int) -> None:
        self._process = process
        self._slots = asyncio.Semaphore(max_in_flight)
        # PERF: one connection each, because a pool looks through all of its connections for every request.
        self._all: list[httpx2.AsyncClient] = []
        self._idle: list[httpx2.AsyncClient] = []

    async def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return await self._answer("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to `body`. Raises RequestError if the server refuses it, StoppedError if it has ended."""
        return await self._answer("POST", path, body)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The events of the streamed answer to `body`."""
        content = _json({**body, "stream": True})
        async with self._connection() as http, http.stream("POST", path, content=content, headers=_HEADERS) as response:
            if response.is_error:
                raise _refusal(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if not line.startswith(_DATA) or line == _DATA + _END:
                    continue
                event = json.loads(line.removeprefix(_DATA))
                if "error" in event:
                    raise _error(event["error"].get("http_status_code", response.status_code), event["error"])
                yield event

    async def close(self) -> None:
        """Closes the connections, also those of running requests."""
        for http in self._all:
            await http.aclose()

    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._connection() as http:
            content = None if body is None else _json(body)
            response = await http.request(method, path, content=content, headers=_HEADERS)
        if response.is_error:
            raise _refusal(response.status_code, response.content)
        return json.loads(response.content)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx2.AsyncClient]:
        async with self._slots:
            if failure := self._process.failure():
                raise failure
            http = self._idle.pop() if self._idle else self._connect()
            try:
                yield http
            except httpx2.TransportError as error:
                raise await self._reason(error) from error
            finally:
                self._idle.append(http)

    def _connect(self) -> httpx2.AsyncClient:
        transport = httpx2.AsyncHTTPTransport(
            uds=str(self._process.socket), verify=_NO_TLS, limits=httpx2.Limits(max_connections=1)
        )
        # The server decides how long a request may take. A proxy of the environment is not for this socket.
        http = httpx2.AsyncClient(transport=transport, base_url="http://penstock", timeout=None, trust_env=False)
        self._all.append(http)
        return http

    async def _reason(self, error: httpx2.TransportError) -> PenstockError:
        """Why a connection broke. A server that is ending closes its connections shortly before it is gone."""
        for _ in range(20):
            if failure := self._process.failure():
                return failure
            await asyncio.sleep(0.05)
        return StoppedError(f"the connection to the server broke: {error!r}")


def _json(body: Mapping[str, Any]) -> bytes:
    """A body as JSON. Numbers and arrays of numpy and torch, and objects of client libraries, are what they hold.

    Raises RequestError for what JSON cannot hold: a number that is not finite, half of a surrogate pair, other objects.
    """
    try:
        return json.dumps(body, default=_plain, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise _unsendable("a text has half of a surrogate pair", None) from error
    except (ValueError, TypeError) as error:
        for name, value in body.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise _unsendable(f"{name} is {value}, must be a finite number", name) from error
        raise _unsendable(str(error), None) from error


def _unsendable(what: str, param: str | None) -> RequestError:
    return RequestError(what, status=400, code="validation", param=param)


def _plain(value: object) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be sent as JSON")


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        return _error(status, json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return RequestError(body.decode(errors="replace"), status=status, code=None, param=None)


def _error(status: int, error: Any) -> RequestError:
    """OpenAI's error object as an exception."""
    return RequestError(error["message"], status=status, code=error.get("code"), param=error.get("param"))
