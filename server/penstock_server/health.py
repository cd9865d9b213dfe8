"""`python -m penstock_server.health`: asks the server in this container whether it is alive; the image's health check.

The address is that of the server's listening socket, so it holds for every flag and variable that chooses one.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import sys
from pathlib import Path

PROCESS_NAME = "penstock"
ROUTE = "/health/live"
LISTENING = "0A"  # in /proc/net/tcp
TIMEOUT_S = 4.0


def find_server() -> int:
    """The pid of the first process of that name. Raises LookupError."""
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME:
                return pid
        except OSError:
            continue  # it has exited
    raise LookupError(f"there is no process named {PROCESS_NAME}")


def address(pid: int) -> tuple[socket.AddressFamily, int | str]:
    """The port, or the path of the unix socket, where the process listens. Raises LookupError if there is none yet."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in sockets:
                return family, int(fields[1].rpartition(":")[2], 16)
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and fields[6] in sockets and len(fields) > 7:
            return socket.AF_UNIX, fields[7]
    raise LookupError(f"process {pid} does not listen yet")


def status(pid: int) -> int:
    """The HTTP status of the route. Raises OSError when the server does not answer."""
    family, place = address(pid)
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        hosts = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
        connection.connect(place if isinstance(place, str) else (hosts[family], place))
        connection.sendall(f"GET {ROUTE} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="penstock_server.health", description="status 0 if the server is alive")
    parser.add_argument("--pid", type=int, help="the server's process; without it, the first one named penstock")
    options = parser.parse_args(arguments)
    try:
        found = status(options.pid if options.pid is not None else find_server())
    except (OSError, LookupError, http.client.HTTPException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{ROUTE} answered {found}")
    return 0 if found == http.HTTPStatus.OK else 1


if __name__ == "__main__":
    sys.exit(main())
