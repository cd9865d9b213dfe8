"""Address of a worker, as a URI: `unix:/path`, or `https://host:port` with mutual TLS. Leaf: no torch, no
protobuf."""

from __future__ import annotations

import os
import ssl
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

# The name in every worker's certificate. Peers check it instead of host names, because each group has an authority of
# its own.
WORKER_NAME = "worker.penstock"


@dataclass(frozen=True, slots=True)
class Tls:
    """A certificate, its key, and the authority that signed the certificates of all peers, as PEM."""

    certificate: str
    key: str = field(repr=False)
    authority: str

    def context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        """For TLS 1.3 in which both sides show a certificate. purpose: what the peer is authenticated as."""
        context = ssl.create_default_context(purpose, cadata=self.authority)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        with ExitStack() as files:
            # `ssl` reads files only. These have no name, so that the key never is on a disk.
            paths = [_unnamed(text, files) for text in (self.certificate, self.key)]
            context.load_cert_chain(*paths)
        return context


def _unnamed(text: str, files: ExitStack) -> str:
    """The path of an open file in memory."""
    file = files.enter_context(os.fdopen(os.memfd_create("penstock tls"), "w"))
    file.write(text)
    file.flush()
    return f"/proc/self/fd/{file.fileno()}"


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A socket in a folder that only this user can open."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path.absolute()}"


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """An address that other machines may reach. Only a peer with a certificate of the same authority is answered."""

    host: str
    port: int
    tls: Tls

    def __str__(self) -> str:
        return f"https://{self.host}:{self.port}"


Endpoint = UnixEndpoint | TcpEndpoint


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, or `[address]:port` of IPv6. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f'"{text}" is no address; must be HOST:PORT')
    return host, int(port)


def parse_endpoint(uri: str, tls: Tls | None) -> Endpoint:
    """Raises ValueError. TCP is refused without TLS."""
    scheme, _, rest = uri.partition(":")
    if scheme == "unix" and rest:
        return UnixEndpoint(Path(rest))
    if scheme == "https" and rest.startswith("//") and tls is not None:
        return TcpEndpoint(*parse_address(rest.removeprefix("//")), tls)
    raise ValueError(f'"{uri}" is no endpoint of a worker; must be unix:PATH, or https://HOST:PORT with certificates')
