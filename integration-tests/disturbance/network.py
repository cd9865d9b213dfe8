"""Another machine, as far as the network can tell: a network namespace on a cable of its own, whose power can be cut.

Linux only, and only for root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_HERE, _THERE = "169.254.83.1", "169.254.83.2"  # link-local: nobody routes these
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoMachineError(Exception):
    """This host lets nobody make one."""


@dataclass(frozen=True)
class Machine:
    name: str
    host: str = _HERE
    """The address under which it reaches this host."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile are that machine's."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(there)
            os.close(home)

    def vanish(self) -> None:
        """From now on nothing is answered, not even by its kernel, and no connection of it is closed."""
        _ip("-n", self.name, "address", "flush", "dev", "cable")


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def another_machine() -> Iterator[Machine]:
    """Raises NoMachineError where there is none to be had."""
    machine = Machine(f"penstock-{os.getpid()}")
    near = f"ps{os.getpid()}"
    if shutil.which("ip") is None:
        raise NoMachineError("`ip` is not installed")
    try:
        _ip("netns", "add", machine.name)
        _ip("link", "add", near, "type", "veth", "peer", "name", "cable", "netns", machine.name)
        _ip("address", "add", f"{_HERE}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", machine.name, "address", "add", f"{_THERE}/30", "dev", "cable")
        _ip("-n", machine.name, "link", "set", "cable", "up")
        yield machine
    except subprocess.CalledProcessError as error:
        raise NoMachineError(error.stderr.decode().strip()) from error
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", near)  # and its other end; the namespace may live on for as long as its sockets
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", machine.name)
