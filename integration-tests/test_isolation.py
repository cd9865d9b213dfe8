"""Bad requests and disconnects leave other streams' tokens unchanged and leak no resource of the server."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from bad_request import Bad, every
from binary import Server
from client import connect, events
from fault.probe import health, wait_for_rest, wait_until

pytestmark = pytest.mark.native

SEED = 20_260_101
TIME_LIMIT_S = 240  # a grammar may take 5 s of CPU time, which streams and other tests share
NUM_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {"grammar": {"type": "json", "value": SCHEMA}},
    {"grammar": {"type": "regex", "value": "([A-Z][a-z]{1,9} ){4,40}"}},
    {"grammar": {"type": "lark", "value": 'start: ("red" | "blue" | "green" | ", ")+'}},
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"do_sample": True, "seed": SEED},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": SEED + 1, "logit_bias": {"28": -5}},
]
STREAMS = [
    {
        "inputs": f"{n}. Write about a person in a village:",
        "parameters": {"max_new_tokens": NUM_TOKENS, "details": True, "top_n_tokens": n % 3, **constraint, **sampling},
    }
    for n, (constraint, sampling) in enumerate((c, s) for c in CONSTRAINTS for s in SAMPLINGS)
]


class Streams:
    """Runs all of STREAMS concurrently and repeats each until the context ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._expected = self._run_all()
        self.differences: list[str] = []
        self.num_answers = 0
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(n,)) for n in range(len(STREAMS))]

    def _run_all(self) -> list[list[dict[str, Any]]]:
        with ThreadPoolExecutor(len(STREAMS)) as pool:
            return list(pool.map(lambda body: events(self._server, "/generate_stream", body), STREAMS))

    def _repeat(self, n: int) -> None:
        while True:
            try:
                answer = events(self._server, "/generate_stream", STREAMS[n])
            except OSError as error:
                self.differences.append(f"stream {n}: {error!r}")
                return
            if answer != self._expected[n]:
                self.differences.append(f"stream {n}: {answer[-1]} instead of {self._expected[n][-1]}")
            self.num_answers += 1
            if self._stopping.is_set():
                return

    def __enter__(self) -> Streams:
        assert all(answer[-1]["generated_text"] for answer in self._expected)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def leaks_nothing(server: Server) -> Iterator[None]:
    """Check that the context leaks no request and no block, and loses no worker."""
    workers = server.worker_pids()
    yield
    wait_for_rest(server)
    wait_until(lambda: health(server) == 200)
    assert set(workers) <= set(server.worker_pids())  # a standby group may start later
    assert server.process.poll() is None
    assert not [line for line in server.lines if "panicked" in line or "Traceback" in line]


def send(server: Server, bad: Bad) -> str | None:
    """Send a bad request. Returns what is wrong with the response, or None."""
    begin = time.monotonic()
    connection = connect(server, TIME_LIMIT_S)
    try:
        headers = {"content-type": bad.content_type} if bad.content_type else {}
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the server may respond before it has read the whole body
            connection.request("POST", bad.path, bad.body, headers)
        response = connection.getresponse()
        text = response.read().decode()
    except OSError as error:
        return f"{bad.name} {bad.path} {bad.body[:150]!r}: {error!r} after {time.monotonic() - begin:.1f} s"
    finally:
        connection.close()
    # An error message is short: it does not echo a large body.
    is_expected = response.status == bad.status and bad.message in text and len(text) < 10_000
    # Whether a costly grammar exceeds its limit of time depends on the machine, and that of states on the answer.
    limits = {422: "`grammar` is not a grammar", 424: "the grammar allows no further token"}
    is_expected = is_expected or (bad.is_costly and response.status in limits and limits[response.status] in text)
    return None if is_expected else f"{bad.name} {bad.path} {bad.body[:150]!r}: {response.status} {text[:300]}"


def test_bad_requests_get_clear_errors_and_change_no_other_stream(server: Server) -> None:
    bad_requests = every()
    with leaks_nothing(server), Streams(server) as streams, ThreadPoolExecutor(8) as pool:
        wrong = [answer for answer in pool.map(lambda bad: send(server, bad), bad_requests) if answer]
    assert not wrong, f"{len(wrong)} of {len(bad_requests)}:\n" + "\n".join(wrong)
    assert not streams.differences
    assert streams.num_answers >= len(STREAMS)


def whole_request(body: dict[str, Any], path: str = "/generate_stream", length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(data) if length is None else length}\r\n\r\n".encode() + data


LONG = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
REGEX = {"inputs": "A", "parameters": {"max_new_tokens": 400, "grammar": {"type": "regex", "value": "[a-z ]{390,}"}}}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 400, "n": 3, "stream": True}
# What a client sends, and how many bytes of the response it reads before it disconnects.
DISCONNECTS = {
    "nothing": (b"", 0),
    "part of a head": (b"POST /generate HTTP/1.1\r\nhost:", 0),
    "a head": (b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n", 0),
    "part of a body": (whole_request(LONG, length=10_000), 0),
    "a plain request": (whole_request(LONG, "/generate"), 0),
    "a stream": (whole_request(LONG), 0),
    "a started stream": (whole_request(LONG), 1),
    "a started constrained stream": (whole_request(REGEX), 1),
    "three started choices": (whole_request(CHAT, "/v1/chat/completions"), 1),
    "two pipelined requests": (whole_request(LONG) * 2, 1),
    "part of the HTTP/2 preface": (b"PRI * HTTP/2.0\r\n", 0),
    "HTTP/2 and garbage": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500, 1),
    "garbage": (bytes(range(256)) * 20, 1),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500, 1),
    "an invalid chunk": (b"POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 1),
}


def disconnect(server: Server, sent: bytes, num_read: int) -> None:
    address = urllib.parse.urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), TIME_LIMIT_S) as client:
        client.sendall(sent)
        with suppress(ConnectionResetError):
            client.recv(num_read)


def drip(server: Server, stopping: threading.Event) -> None:
    """Send the heads of 100 requests slowly, byte by byte."""
    address = urllib.parse.urlsplit(server.url)
    clients = [socket.create_connection((address.hostname, address.port)) for _ in range(100)]
    head = b"POST /generate HTTP/1.1\r\nx-padding: " + b"a" * 10_000
    for position in range(len(head)):
        if stopping.wait(0.2):
            break
        for client in clients:
            try:
                client.send(head[position : position + 1])
            except OSError:
                continue  # the server has timed it out
    for client in clients:
        client.close()


def test_disconnects_and_slow_clients_change_no_other_stream(server: Server) -> None:
    stopping = threading.Event()
    dripping = threading.Thread(target=drip, args=(server, stopping))
    with leaks_nothing(server), Streams(server) as streams, ThreadPoolExecutor(4) as pool:
        dripping.start()
        list(pool.map(lambda one: disconnect(server, *one), list(DISCONNECTS.values()) * 2))
        stopping.set()
        dripping.join()
    assert not streams.differences
    assert streams.num_answers >= len(STREAMS)
