"""Clients that disconnect at random moments, over HTTP/1.1 and HTTP/2, by closing or by resetting."""

from __future__ import annotations

import random
import socket
import struct
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from binary import Server
from client import connect

from . import http2
from .mix import REGEX, Request, answer_of, events
from .probe import wait_for_rest, wait_until

TIMEOUT_S = 300
MOMENTS = ("in the head", "in the body", "at once", "soon", "first event", "midway", "near the end", "at the end")
WAYS = ("close", "reset", "keep-alive", "http2 stream", "http2 connection")
NUM_AT_ONCE = 24


@dataclass
class Cancels:
    num_cancels: int = 0
    moments: Counter[str] = field(default_factory=Counter)


def random_request(source: random.Random) -> tuple[Request, int]:
    """(a streaming request with a new prompt, maximum number of its events)"""
    words = " ".join(str(source.randrange(1000)) for _ in range(source.choice([2, 20, 60, 150])))
    num_tokens = source.choice([4, 16, 48, 128])
    if source.random() < 0.2:
        messages = [{"role": "user", "content": words}]
        body = {"messages": messages, "max_tokens": num_tokens, "n": 2, "stream": True, "ignore_eos": True}
        return Request("/v1/chat/completions", body), 2 * num_tokens
    parameters: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True, "top_n_tokens": 2}
    if source.random() < 0.2:
        parameters = {"max_new_tokens": num_tokens, "grammar": REGEX, "do_sample": True}
    return Request("/generate_stream", {"inputs": words, "parameters": parameters}), num_tokens


def _num_events(moment: str, most: int, source: random.Random) -> int:
    near_the_end = max(1, most - source.randint(1, 2))
    return {"first event": 1, "midway": source.randint(1, most), "near the end": near_the_end, "at the end": most}.get(
        moment, 0
    )


def _disconnect_http1(server: Server, way: str, moment: str, source: random.Random) -> None:
    request, most = random_request(source)
    connection = connect(server, TIMEOUT_S)
    connection.connect()
    client = connection.sock
    if way == "keep-alive":
        connection.request("GET", "/info")
        connection.getresponse().read()
    data = request.data
    head = f"POST {request.path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    whole = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    num_head = len(whole) - len(data)
    sent = {"in the head": source.randrange(num_head), "in the body": source.randrange(num_head, len(whole))}
    client.sendall(whole[: sent.get(moment, len(whole))])
    seen, wanted = 0, _num_events(moment, most, source)
    while seen < wanted:
        piece = client.recv(1 << 16)
        seen += piece.count(b"data:")
        if not piece or b"\r\n0\r\n\r\n" in piece or b"HTTP/1.1 429" in piece:
            break
    if moment == "soon":
        client.settimeout(source.uniform(0.001, 0.3))
        with suppress(TimeoutError):
            client.recv(1)
    if way == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _disconnect_http2(server: Server, way: str, moment: str, source: random.Random) -> None:
    address = urllib.parse.urlsplit(server.url)
    connection = http2.Connection((address.hostname or "", address.port or 0), TIMEOUT_S)
    for _ in range(source.randint(1, 3) if way == "http2 stream" else 1):
        request, most = random_request(source)
        data = request.data
        is_partial = moment in ("in the head", "in the body")
        stream = connection.post(request.path, data, source.randrange(len(data)) if is_partial else None)
        connection.read_events(stream, _num_events(moment, most, source))
        if moment == "soon":
            connection.socket.settimeout(source.uniform(0.001, 0.3))
            with suppress(TimeoutError):
                connection.read_events(stream, 1)
            connection.socket.settimeout(TIMEOUT_S)
        if way == "http2 stream":
            connection.cancel(stream)
    connection.socket.close()


def cancel(server: Server, num_cancels: int, seed: str) -> Cancels:
    """Send `num_cancels` requests, up to NUM_AT_ONCE concurrently, and disconnect from each at a random moment."""
    result = Cancels(num_cancels)

    def one(number: int) -> str:
        source = random.Random(f"{seed}/{number}")
        way, moment = source.choice(WAYS), source.choice(MOMENTS)
        disconnect = _disconnect_http2 if way.startswith("http2") else _disconnect_http1
        disconnect(server, way, moment, source)
        return f"{way}, {moment}"

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        result.moments.update(pool.map(one, range(num_cancels)))
    return result


@contextmanager
def leaves_nothing_behind(server: Server, num_permits: int) -> Iterator[None]:
    """Check that after the context all blocks are free, nothing runs, and all admission permits are available."""
    wait_for_rest(server)
    yield
    wait_for_rest(server)
    requests = [
        Request("/generate_stream", {"inputs": f"{n} and", "parameters": {"max_new_tokens": 8, "ignore_eos": True}})
        for n in range(num_permits)
    ]

    def all_are_admitted() -> bool:
        with ThreadPoolExecutor(num_permits) as pool:
            try:
                return all(list(pool.map(lambda request: len(answer_of(list(events(server, request)))[-1]), requests)))
            except OSError:
                return False

    # A request cancelled during tokenization returns its permit slightly later than its blocks.
    wait_until(all_are_admitted, f"{num_permits} concurrent requests are admitted", timeout_s=60)
    wait_for_rest(server)
