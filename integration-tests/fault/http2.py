"""A minimal HTTP/2 client (RFC 9113) that requests several streams on a connection and resets them."""

from __future__ import annotations

import socket
import struct
from collections import Counter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
CANCEL = 8
WINDOW_BYTES = 1 << 24


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(fields: list[tuple[str, str]]) -> bytes:
    """HPACK literals (RFC 7541, section 6.2.2) without indexing and without Huffman coding."""
    block = b""
    for name, value in fields:
        assert max(len(name), len(value)) < 127, "longer strings need multi-byte lengths"
        block += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


class Connection:
    """A client connection. `events` counts the received events of each stream; `ended` holds the closed streams."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self.socket = socket.create_connection(address, timeout_s)
        self.events: Counter[int] = Counter()
        self.ended: set[int] = set()
        self._next_stream, self._received = 1, b""
        window = struct.pack(">HI", 4, WINDOW_BYTES)  # SETTINGS_INITIAL_WINDOW_SIZE
        widened = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW_BYTES))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, window) + widened)

    def post(self, path: str, body: bytes, num_sent: int | None = None) -> int:
        """Send `num_sent` bytes of the body, or all of it and the end of the stream. Returns the stream's number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        block = header_block([*fields, ("content-type", "application/json"), ("content-length", str(len(body)))])
        is_whole = num_sent is None
        self.socket.sendall(
            frame(HEADERS, END_HEADERS, stream, block)
            + frame(DATA, END_STREAM if is_whole else 0, stream, body[:num_sent])
        )
        return stream

    def read_events(self, stream: int, count: int) -> None:
        """Read until `count` events have arrived on the stream, or until it ends."""
        while self.events[stream] < count and stream not in self.ended:
            self._take(*self._read_frame())

    def cancel(self, stream: int) -> None:
        self.socket.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def _read_frame(self) -> tuple[int, int, int, bytes]:
        head = self._read(9)
        size = int.from_bytes(head[:3], "big")
        return head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, self._read(size)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            piece = self.socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("the server has closed the connection")
            self._received += piece
        taken, self._received = self._received[:size], self._received[size:]
        return taken

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self.events[stream] += payload.count(b"data:")
        elif kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)
