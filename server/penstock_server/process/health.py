"""`python -m penstock_server.process.health`: asks the server in this container whether it is alive; the image's health
check.

The addresses are those of the server's listening sockets, so it holds for every flag and variable that chooses them.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import os
import socket
import sys
from pathlib import Path

# The second one is text-generation-launcher, TGI's name of the program, as the kernel cuts it.
PROCESS_NAMES = ("penstock", "text-generation")
ROUTE = "/health/live"
LISTENING = "0A"  # in /proc/net/tcp
TIMEOUT_S = 4.0  # for all addresses together; less than the timeout of the image's check
Address = tuple[socket.AddressFamily, tuple[str, int] | str]


def find_server() -> int:
    """The pid of the first process with one of the names. Raises LookupError."""
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() in PROCESS_NAMES:
                return pid
        except OSError:
            continue  # it has exited
    raise LookupError(f"there is no process named {' or '.join(PROCESS_NAMES)}")


def addresses(pid: int) -> list[Address]:
    """Addresses that the process listens on: hosts with ports, and paths of unix sockets. LookupError if none yet."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    found: list[Address] = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in sockets:
                host, _, port = fields[1].rpartition(":")
                found.append((family, (reachable(host), int(port, 16))))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)  # the path may have spaces
        if fields[3] == "00010000" and fields[6] in sockets and len(fields) > 7:
            found.append((socket.AF_UNIX, fields[7]))
    if not found:
        raise LookupError(f"process {pid} does not listen yet")
    return found


def reachable(host: str) -> str:
    """The address to connect to. host: as in /proc/net/tcp, words of 32 bits in the machine's byte order."""
    words = [int(host[first : first + 8], 16).to_bytes(4, sys.byteorder) for first in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address)


def is_node(pid: int) -> bool:
    """Whether the process is `penstock node`, which listens for a launcher with TLS and has no HTTP routes."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [b"node"]


def check(pid: int) -> str:
    """What the process answered, in words. Raises LookupError when it does not listen, or no address answers as it
    should. --engine-listen is one of the addresses and does not speak HTTP/1.1, so one good answer is enough."""
    found, accepts = addresses(pid), is_node(pid)
    errors = []
    for family, place in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(TIMEOUT_S / len(found))
                connection.connect(place)
                if accepts:
                    return "the node accepts connections"
                status = ask(connection)
        except (OSError, http.client.HTTPException) as error:
            errors.append(str(error))
            continue
        if status == http.HTTPStatus.OK:
            return f"{ROUTE} answered {status}"
        errors.append(f"{ROUTE} answered {status}")
    raise LookupError("; ".join(errors))


def ask(connection: socket.socket) -> int:
    """The HTTP status of the route."""
    connection.sendall(f"GET {ROUTE} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock_server.process.health", description="status 0 if the server is alive"
    )
    parser.add_argument("--pid", type=int, help="the server's process; without it, the first one named penstock")
    options = parser.parse_args(arguments)
    try:
        print(check(options.pid if options.pid is not None else find_server()))
    except (OSError, LookupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
