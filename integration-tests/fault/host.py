"""Faults of the host: an unread log, a full disk, and a jumping clock."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from binary import PENSTOCK, START_TIMEOUT_S, Server, reserved_port

from .probe import health, wait_until

# Shifts a process's wall clock every 50 ms: a year ahead, correct, an hour behind, correct.
JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t offset(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    static const time_t offsets[] = {31536000, 0, -3600, 0};
    return offsets[(now.tv_sec * 20 + now.tv_nsec / 50000000) % 4];
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def jumping_clock(compiler: str, folder: Path) -> Path:
    """Compile the library to preload."""
    source, library = folder / "jumping_clock.c", folder / "jumping_clock.so"
    source.write_text(JUMPING_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@contextmanager
def logging_to(output: int | IO[Any], *arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A running server that writes stdout and stderr to `output`. It must exit with status 0."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    with reserved_port() as port:
        command = [PENSTOCK, "--json-output", "--hostname", "127.0.0.1", "--port", str(port), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
        server = Server(process, f"http://127.0.0.1:{port}")

        def is_healthy() -> bool:
            assert process.poll() is None, "the server exited before it was ready"
            try:
                return health(server) == 200
            except OSError:
                return False

        try:
            wait_until(is_healthy, "the server is healthy", START_TIMEOUT_S)
            yield server
            assert server.stop() == 0
        finally:
            process.kill()
            process.wait()


@contextmanager
def unread_pipe(has_reader: bool) -> Iterator[int]:
    """The write end of a pipe whose read end is open but never read, or is closed."""
    reading, writing = os.pipe()
    if not has_reader:
        os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
        if has_reader:
            os.close(reading)


@contextmanager
def full_disk() -> Iterator[int]:
    device = os.open("/dev/full", os.O_WRONLY)
    try:
        yield device
    finally:
        os.close(device)


@contextmanager
def with_jumping_clock(compiler: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        library = jumping_clock(compiler, Path(folder))
        with logging_to(log, env={"LD_PRELOAD": str(library)}) as server:
            yield server
            log.seek(0)
            server.lines += log.read().splitlines()
