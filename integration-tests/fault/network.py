"""Simulates another machine by a network namespace whose link can be cut. Linux only, needs root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_NETWORK = "169.254.{}"  # link-local, never routed
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoMachineError(Exception):
    """This host cannot simulate a machine."""


@dataclass(frozen=True)
class Machine:
    name: str
    host: str
    """This host's address, as seen from the machine."""
    address: str
    """The machine's own address."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within the context, sockets created by this thread belong to the machine."""
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
        """Stop answering, even at kernel level, without closing any connection."""
        _ip("-n", self.name, "address", "flush", "dev", "cable")


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def another_machine(subnet: int = 83) -> Iterator[Machine]:
    """subnet: of this machine only. Raises NoMachineError if this host cannot simulate a machine."""
    network = _NETWORK.format(subnet)
    machine = Machine(f"penstock-{os.getpid()}", f"{network}.1", f"{network}.2")
    near = f"ps{os.getpid()}"
    if shutil.which("ip") is None:
        raise NoMachineError("`ip` is not installed")
    try:
        _ip("netns", "add", machine.name)
        _ip("link", "add", near, "type", "veth", "peer", "name", "cable", "netns", machine.name)
        _ip("address", "add", f"{machine.host}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", machine.name, "address", "add", f"{machine.address}/30", "dev", "cable")
        for device in ("cable", "lo"):
            _ip("-n", machine.name, "link", "set", device, "up")
        yield machine
    except subprocess.CalledProcessError as error:
        raise NoMachineError(error.stderr.decode().strip()) from error
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", near)  # removes both ends; the namespace lives as long as its sockets
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", machine.name)
