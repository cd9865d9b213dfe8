"""Clients that read slowly or never, and connections that never complete a request."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from binary import Server

from .mix import Request

SMALL_BUFFER_BYTES = 2048
# 400 events of several hundred bytes each: more than the socket buffers of both sides hold.
LONG = Request(
    "/generate_stream",
    {"inputs": "A long story:", "parameters": {"max_new_tokens": 400, "ignore_eos": True, "top_n_tokens": 5}},
)


def _connect(server: Server) -> socket.socket:
    address = urllib.parse.urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    client.connect((address.hostname, address.port))
    return client


def _whole(request: Request) -> bytes:
    head = f"POST {request.path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(request.data)}\r\n\r\n".encode() + request.data


@contextmanager
def slow_readers(server: Server, num: int) -> Iterator[list[socket.socket]]:
    """Clients with small buffers and long answers. Every other one reads a byte per second, the rest never read.

    The server disconnects them after `ConnectionLimits::client_timeout`.
    """
    clients = [_connect(server) for _ in range(num)]
    stopping = threading.Event()

    def drip() -> None:
        while not stopping.wait(1.0):
            for client in clients[::2]:
                with suppress(BlockingIOError, ConnectionResetError):
                    client.recv(1, socket.MSG_DONTWAIT)

    reading = threading.Thread(target=drip)
    for client in clients:
        client.sendall(_whole(LONG))
    reading.start()
    try:
        yield clients
    finally:
        stopping.set()
        reading.join()
        for client in clients:
            client.close()


def has_ended(client: socket.socket) -> bool:
    """Whether the server has closed the connection, so that another byte is answered by a reset."""
    try:
        client.send(b"x")
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def rest(client: socket.socket) -> bytes:
    """All bytes that have arrived."""
    arrived = bytearray()
    with suppress(BlockingIOError, ConnectionResetError):
        while part := client.recv(1 << 16, socket.MSG_DONTWAIT):
            arrived += part
    return bytes(arrived)


HALVES = {
    "nothing": b"",
    "a byte": b"P",
    "half a head": b"POST /generate HTTP/1.1\r\nhost: te",
    "a head": b"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n",
    "half a body": _whole(LONG)[:-20],
    "half a chunk": b"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nff\r\n{",
    "half of HTTP/2's beginning": b"PRI * HTTP/2.0\r\n",
    "HTTP/2 and half a frame": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x10\x01",
}


@contextmanager
def half_open(server: Server, num_each: int) -> Iterator[list[socket.socket]]:
    """`num_each` connections for each of HALVES. At the end half of them close and half reset."""
    clients = []
    for sent in list(HALVES.values()) * num_each:
        client = _connect(server)
        client.sendall(sent)
        clients.append(client)
    try:
        yield clients
    finally:
        for number, client in enumerate(clients):
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
