"""Frames of a stream of steps over a unix socket, which proto/worker.proto specifies under `Steps`. Leaf: no torch,
no protobuf."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

OK = 0  # the status code of a frame that holds a message
_LENGTH = struct.Struct("<I")
_RETRY_S = 0.1  # after a connection could not be accepted
_HEAD = struct.Struct("<IB")  # the length of what follows it, and the status code that this begins with


def steps_socket(path: Path) -> Path:
    """The socket for streams of steps of the worker that listens on this one."""
    return path.with_name(f"{path.name}.steps")


class Frames:
    """A connection. `write` and `close` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = connection.makefile("rb")
        self._writing = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """The status code and the rest of each frame, until the other side closes its direction, or `close` is called.
        Raises OSError when the connection is lost within a frame."""
        while head := self._received.read(_LENGTH.size):
            (num_bytes,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (0,)
            frame = self._received.read(num_bytes)
            if not frame or len(frame) < num_bytes:
                raise ConnectionResetError("the connection was closed within a frame")
            yield frame[0], frame[1:]

    def write(self, code: int, payload: bytes) -> None:
        """Nothing happens if the other side has left: reading shows that."""
        with self._writing, suppress(OSError):
            self._connection.sendall(_HEAD.pack(1 + len(payload), code) + payload)

    def close(self) -> None:
        """End both directions."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class FrameListener:
    """Accepts connections on a unix socket. Raises OSError if it cannot be bound."""

    def __init__(self, path: Path) -> None:
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise

    def __iter__(self) -> Iterator[Frames]:
        """Each connection, until `close`. One that cannot be accepted, for example because the process has too many
        files open, waits for the next attempt."""
        with self._listener:
            while not self._closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed.wait(_RETRY_S):
                        logger.warning("a connection for steps cannot be accepted: %s", error)
                else:
                    yield Frames(connection)

    def close(self) -> None:
        """End the iteration."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
