"""Valid requests broken at random, in their JSON or in their HTTP framing.

Some are still served, with up to the maximum number of tokens: start the server with a low `--max-total-tokens`.
"""

from __future__ import annotations

import errno
import json
import random
import socket
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bad_request import every
from binary import Server

from .mix import Answer, Repeated, Request

TIMEOUT_S = 600  # a request that lost its token limit runs to the server's limit
NUM_AT_ONCE = 8
CLOSED = {
    errno.EPIPE,
    errno.ECONNRESET,
    errno.ENOTCONN,
}  # the server may close the connection before it has read everything
# 200: some mutations are harmless. 408: the request was incomplete. 424: a grammar that no token can continue.
ALLOWED = {200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 424, 429, 431, 501, 505}
WILD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, -1e-308, "", "a", "\x00", "\ud83d\ude00",
    "\u202e" * 50, "a" * 5000, [], {}, [[]], [None], {"": None}, {"type": "json"}, ["a"] * 300,
]  # fmt: skip
BASES = [
    ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "temperature": 0.5, "stop": ["a"]}}),
    ("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "top_k": 5, "details": True}}),
    ("/", {"inputs": "Hello", "stream": True, "parameters": {"max_new_tokens": 2, "typical_p": 0.5}}),
    ("/tokenize", {"inputs": "Hello"}),
    ("/invocations", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "temperature": 0.5, "n": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "max_tokens": 2,
            "stream": True,
            "logit_bias": {"5": 1},
            "response_format": {"type": "json_object"},
        },
    ),
]  # fmt: skip


@dataclass
class Malformed:
    num_requests: int = 0
    num_answers: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [place for key, child in children for place in _places(child, (*path, key))]
    # Token limits are kept, because without them the answers would be long.
    return inner if not path or path[-1] in ("parameters", "max_new_tokens", "max_tokens") else [path, *inner]


def _wild_value(source: random.Random) -> tuple[str, bytes]:
    """A valid body in which one value is replaced by an unexpected one."""
    path, base = source.choice(BASES)
    body = json.loads(json.dumps(base))
    place = source.choice(_places(body))
    parent = body
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = source.choice(WILD)
    return path, json.dumps(body).encode()


def _wild_bytes(source: random.Random) -> tuple[str, bytes]:
    """A valid body that is truncated, or in which bytes are changed or inserted."""
    path, base = source.choice(BASES)
    data = bytearray(json.dumps(base).encode())
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(data))
        match source.randrange(5):
            case 0:
                del data[place:]
            case 1:
                data[place] = source.randrange(256)
            case 2:
                data[place:place] = source.randbytes(source.randint(1, 20))
            case 3:
                data[place:place] = b"[" * source.choice([10, 200, 20_000])
            case 4:
                data[place:place] = data[: source.randrange(len(data))]
        if not data:
            break
    return path, bytes(data)


def _deep(source: random.Random) -> tuple[str, bytes]:
    path, base = source.choice(BASES)
    depth = source.choice([50, 127, 128, 129, 1000, 50_000])
    opening, closing = source.choice([(b"[", b"]"), (b'{"a":', b"}")])
    field_name = source.choice(list(base)).encode()
    return path, b'{"' + field_name + b'":' + opening * depth + b"1" + closing * depth + b"}"


def _framed(path: str, body: bytes, *fields: bytes) -> bytes:
    lines = [b"POST " + path.encode() + b" HTTP/1.1", b"host: test", b"connection: close", *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _with_body(make: Callable[[random.Random], tuple[str, bytes]]) -> Callable[[random.Random], bytes]:
    def request(source: random.Random) -> bytes:
        path, body = make(source)
        return _framed(path, body, b"content-type: application/json", f"content-length: {len(body)}".encode())

    return request


def _broken_framing(source: random.Random) -> bytes:
    """A valid body in a message whose headers contradict it."""
    path, base = source.choice(BASES)
    body, kind = json.dumps(base).encode(), b"content-type: application/json"
    length = f"content-length: {len(body)}".encode()
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return source.choice(
        [
            _framed(path, body, kind, f"content-length: {source.choice([0, 1, len(body) - 1])}".encode()),
            _framed(path, body, kind, b"content-length: " + source.choice([b"1000", b"1000000", b"1" + b"0" * 20])),
            _framed(path, body, kind, b"content-length: -1"),
            _framed(path, body, kind, length, b"content-length: 3"),
            _framed(path, body, kind, length, b"transfer-encoding: chunked"),
            _framed(path, chunk, kind, b"transfer-encoding: chunked, gzip"),
            _framed(path, source.randbytes(200), kind, b"transfer-encoding: chunked"),
            _framed(path, b"fffffffffffffffff\r\n" + body, kind, b"transfer-encoding: chunked"),
            _framed(path, b"5;" + b"a" * 20_000 + b"\r\nhello", kind, b"transfer-encoding: chunked"),
            _framed(path, body, kind),
            _framed(path, body, kind, length, b"x-long: " + b"a" * source.choice([1000, 70_000, 1_000_000])),
            _framed(path, body, kind, length, *(f"x-{n}: {n}".encode() for n in range(source.choice([90, 1000])))),
            _framed(path, body, kind, length, b"x-\x00zero: 1"),
            _framed(path, body, kind, length, b"no colon"),
            _framed(path, body, kind, length, b"expect: everything"),
            _framed(path + "?" + "a" * source.choice([10, 70_000]), body, kind, length),
            _framed(path, body, kind, length, b"authorization: \xff\xfe"),
            _framed(path, body, b"content-type: " + source.randbytes(20).replace(b"\n", b""), length),
            _framed(path, body, kind, length).replace(b"POST", source.choice([b"GET", b"\x80", b"A" * 5000]), 1),
            _framed(path, body, kind, length).replace(b"HTTP/1.1", source.choice([b"HTTP/0.9", b"HTTP/3", b""]), 1),
            source.randbytes(source.choice([1, 50, 5000])),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + source.randbytes(source.choice([9, 100, 5000])),
        ]
    )  # fmt: skip


MUTATIONS: dict[str, Callable[[random.Random], bytes]] = {
    "value": _with_body(_wild_value),
    "bytes": _with_body(_wild_bytes),
    "depth": _with_body(_deep),
    "framing": _broken_framing,
}


def _send(server: Server, data: bytes, ends: bool) -> bytes:
    """The response until the server closes the connection. `ends`: shut the sending side down after `data`."""
    address = urllib.parse.urlsplit(server.url)
    answer = b""
    with socket.create_connection((address.hostname, address.port), TIMEOUT_S) as client:
        try:
            client.sendall(data)
            if ends:
                client.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno not in CLOSED:
                raise
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                answer += piece
    return answer


def malform(
    server: Server, asked: Sequence[Request], expected: Sequence[Answer] | None, num_requests: int, seed: str
) -> Malformed:
    """Send malformed requests while streams run. Each must get an allowed status, never a server error."""
    known = [bad for bad in every() if not bad.is_costly and len(bad.body) < 1_000_000]
    result = Malformed(num_requests)

    def one(number: int) -> tuple[str, str | None]:
        source = random.Random(f"{seed}/{number}")
        if number % 10 == 0:
            bad = source.choice(known)
            fields = [f"content-type: {bad.content_type}".encode()] * bool(bad.content_type)
            data = _framed(bad.path, bad.body, *fields, f"content-length: {len(bad.body)}".encode())
            name, allowed = f"known: {bad.name}", {bad.status}
        else:
            name = source.choice(list(MUTATIONS))
            data, allowed = MUTATIONS[name](source), ALLOWED
        try:
            answer = _send(server, data, ends=name == "framing")
        except OSError as error:
            return "none", f"{number}, {name}: {data[:300]!r}: {error!r}"
        is_http1 = answer.startswith(b"HTTP/1.1 ")
        status = int(answer[9:12]) if is_http1 else 0
        # Bytes that are not HTTP get no HTTP response.
        if status in allowed or (name == "framing" and not is_http1):
            return str(status), None
        return str(status), f"{number}, {name}: {data[:300]!r}: {answer[:300]!r}"

    with Repeated(server, asked, expected) as streams, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for status, wrong in pool.map(one, range(num_requests)):
            result.statuses[status] += 1
            result.wrong += [wrong] * bool(wrong)
    result.num_answers, result.differences = streams.num_answers, streams.differences
    return result
