"""Frames over a unix socket: how they end, and what a listener does that cannot accept."""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from penstock_server.protocol.frames import OK, FrameListener, Frames


@contextmanager
def listening(path: Path) -> Iterator[list[Frames]]:
    """What a listener has accepted so far. It ends within the context."""
    listener, accepted = FrameListener(path), []
    thread = threading.Thread(target=lambda: accepted.extend(listener))
    thread.start()
    try:
        yield accepted
    finally:
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    connection.settimeout(10)
    return connection


def pair() -> tuple[Frames, socket.socket]:
    ours, theirs = socket.socketpair()
    return Frames(ours), theirs


def test_frames_arrive_as_written() -> None:
    ours, theirs = pair()
    frames = [(OK, b"one"), (OK, b""), (13, b"x" * 100_000)]
    other = Frames(theirs)
    writer = threading.Thread(target=lambda: [*(other.write(*frame) for frame in frames), other.close()])
    writer.start()
    assert list(ours) == frames
    writer.join()


@pytest.mark.parametrize(
    "sent", [b"\x01", struct.pack("<I", 0), struct.pack("<IB", 5, OK), struct.pack("<IBB", 9, OK, 1)]
)
def test_a_connection_that_is_lost_within_a_frame_is_an_error(sent: bytes) -> None:
    ours, theirs = pair()
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(ConnectionResetError, match="within a frame"):
        list(ours)


def test_writing_to_a_side_that_has_left_does_nothing() -> None:
    ours, theirs = pair()
    theirs.close()
    ours.write(OK, b"late")
    ours.close()
    assert list(ours) == []


def test_a_listener_without_free_files_accepts_when_there_are_some_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps"
    with listening(path) as accepted, connect(path) as first:
        first.sendall(struct.pack("<IB", 1, OK))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        second = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))  # the only number below it is that of stdin
        try:
            second.connect(str(path))
            while "too many" not in caplog.text.lower():
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while len(accepted) < 2:
            time.sleep(0.01)
        accepted[1].write(OK, b"hello")
        second.settimeout(10)
        assert second.recv(100) == struct.pack("<IB", 6, OK) + b"hello"
        second.close()


def test_a_closed_listener_accepts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with listening(path) as accepted:
        connect(path).close()
    assert len(accepted) <= 1
    with pytest.raises(ConnectionRefusedError):
        connect(path)
