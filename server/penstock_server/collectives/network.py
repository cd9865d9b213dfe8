"""Tensors of ranks on several machines are exchanged over TLS connections, one for each pair of ranks.

Not gloo: without TLS, anyone on the network could read and change what the ranks exchange.
INVARIANT: both ends of a connection have shown a certificate of the group's authority, and then the group's token."""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed does not declare them for mypy

from penstock_server.collectives.gathered import Gathered
from penstock_server.errors import ConfigError
from penstock_server.protocol.config import Node
from penstock_server.protocol.endpoint import WORKER_NAME, parse_address

logger = logging.getLogger(__name__)

SCHEME = "tls://"
_MEETING_S = 300.0  # until all ranks are connected
_HANDSHAKE_S = 10.0
_MAX_HANDSHAKES = 64  # at a time, those of strangers too
_ACCEPT_S = 0.2  # between two looks at who has connected
_RETRY_S = 0.05
_SILENCE_S = 20  # silence after which a machine counts as gone
_PROBES = 3
_BUFFER_BYTES = 1 << 19
_SHORT_BYTES = 1 << 16  # size of a tensor that surely fits into the buffers of a connection, with TLS's records
_RANK = struct.Struct("!I")

Peers = dict[int, ssl.SSLSocket]


class Network(Gathered):
    """Connections between some ranks of a model. Raises RuntimeError when another rank's process has exited."""

    def __init__(self, rank: int, ranks: Sequence[int], peers: Peers) -> None:
        """ranks: of the model, in the order of their numbers in this group; `rank` is this one, and `peers` are the
        connections to the others, by rank."""
        super().__init__(ranks.index(rank), len(ranks))
        self._ranks = ranks
        # By number, in the same order for all.
        self._peers = {number: peers[other] for number, other in enumerate(ranks) if other != rank}

    def part(self, ranks: Sequence[int]) -> Network:
        """Sub-network of `ranks`, which include this one, over the same connections. Calls on both networks take
        turns: all ranks must issue them in the same order."""
        peers = {self._ranks[number]: peer for number, peer in self._peers.items()}
        return Network(self._ranks[self._rank], ranks, peers)

    def _gather(self, x: Tensor, widths: Sequence[int], joined: Tensor | None = None) -> None:
        rows, places = x.shape[0], _places(widths)
        mine = _bytes(x)
        received = {
            rank: torch.empty((rows, widths[rank]), dtype=x.dtype) for rank in self._peers if joined is not None
        }
        if rows * max(widths) * x.element_size() <= _SHORT_BYTES:
            for rank in self._peers:
                self._send(rank, mine)
            for rank, part in received.items():
                self._receive(rank, part)
        else:
            # Each two ranks take turns, in an order that is the same for all pairs, so that no rank waits in a circle.
            for rank in self._peers:
                if self._rank < rank:
                    self._send(rank, mine)
                if rank in received:
                    self._receive(rank, received[rank])
                if self._rank > rank:
                    self._send(rank, mine)
        if joined is not None:
            for rank, part in {**received, self._rank: x}.items():
                joined[:, places[rank]] = part

    def _send(self, rank: int, data: memoryview) -> None:
        if not data:
            return
        try:
            self._peers[rank].sendall(data)
        except OSError as error:
            raise RuntimeError(f"the connection to rank {self._ranks[rank]} was lost: {error}") from error

    def _receive(self, rank: int, part: Tensor) -> None:
        left = _bytes(part)
        while left:
            try:
                num_bytes = self._peers[rank].recv_into(left)
            except OSError as error:
                raise RuntimeError(f"the connection to rank {self._ranks[rank]} was lost: {error}") from error
            if num_bytes == 0:
                raise RuntimeError(f"rank {self._ranks[rank]} has exited")
            left = left[num_bytes:]


def _places(widths: Sequence[int]) -> list[slice]:
    ends = torch.tensor(widths).cumsum(0).tolist()
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor itself; of another tensor, that of a copy."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().data


def meet(rank: int, size: int, rendezvous: str, node: Node) -> Network:
    """Connect to all other ranks. rendezvous: `tls://`, then where each rank listens, in their order. Blocks until all
    are connected. Raises ConfigError."""
    addresses = _addresses(rendezvous)
    if len(addresses) != size:
        raise ConfigError(f"the rendezvous has {len(addresses)} addresses, must have one for each of {size} ranks")
    deadline = time.monotonic() + _MEETING_S
    with _listen(node.listen) as listener:
        peers = {other: _connect(rank, other, addresses[other], node, deadline) for other in range(rank)}
        peers |= _accept(listener, set(range(rank + 1, size)), node, deadline)
    for peer in peers.values():
        peer.settimeout(None)
    logger.info("the ranks exchange tensors over TLS connections")
    return Network(rank, range(size), peers)


def open_store(network: Network, rank: int, size: int, rendezvous: str, node: Node) -> Store:
    """The store of torch.distributed that connects the ranks. It listens where rank 0 does, at a port that the system
    chooses, and that the others learn over TLS. The store itself and NCCL have neither encryption nor authentication.
    rendezvous: as of `meet`. Raises ConfigError."""
    host, _ = _addresses(rendezvous)[0]
    port = torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        return _store(host, int(network.broadcast(port).item()), size)
    with _listen((node.listen[0], 0)) as listener:
        port.fill_(listener.getsockname()[1])
        store = _store(host, int(port.item()), size, listener)
    network.broadcast(port)
    return store


def _store(host: str, port: int, size: int, listener: socket.socket | None = None) -> Store:
    """listener: of the rank that has the store, which takes it over."""
    own: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
    try:
        return TCPStore(host, port, size, wait_for_workers=False, **own)
    except dist.DistError as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"the store of rank 0 at {host}:{port} was not reached: {reason}") from error


def _addresses(rendezvous: str) -> list[tuple[str, int]]:
    """Raises ConfigError."""
    try:
        return [parse_address(text) for text in rendezvous.removeprefix(SCHEME).split(",")]
    except ValueError as error:
        raise ConfigError(f"the rendezvous {rendezvous} cannot be used: {error}") from error


def _listen(address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    # The process that gave the port out keeps it bound, so that no other process gets it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {address[0]}:{address[1]} for the other ranks: {error}") from error
    listener.listen(128)
    return listener


def _connect(rank: int, other: int, address: tuple[str, int], node: Node, deadline: float) -> ssl.SSLSocket:
    context = node.tls.context(ssl.Purpose.SERVER_AUTH)
    while True:
        try:
            plain = socket.create_connection(address, timeout=_HANDSHAKE_S)
            _set_options(plain)
            peer = context.wrap_socket(plain, server_hostname=WORKER_NAME)
            peer.sendall(_RANK.pack(rank) + node.token.encode())
            if peer.recv(1):
                return peer
            reason = "it closed the connection"
        except OSError as error:  # it does not listen yet, or refuses
            reason = str(error)
        if time.monotonic() > deadline:
            raise ConfigError(f"rank {other} at {address[0]}:{address[1]} was not reached in {_MEETING_S} s: {reason}")
        time.sleep(_RETRY_S)


def _accept(listener: socket.socket, awaited: set[int], node: Node, deadline: float) -> Peers:
    context = node.tls.context(ssl.Purpose.CLIENT_AUTH)
    peers: Peers = {}

    def greet(plain: socket.socket) -> None:
        try:
            plain.settimeout(_HANDSHAKE_S)
            _set_options(plain)
            peer = context.wrap_socket(plain, server_side=True)
            rank = _greeting(peer, node.token.encode())
            if rank not in awaited or rank in peers:
                return peer.close()
            peer.sendall(b"\1")
            peers[rank] = peer
        except OSError:  # one connection failed, as a scanner's does; the ranks try again
            plain.close()

    # A thread for each connection: a stranger who says nothing delays no rank.
    greetings: set[Future[None]] = set()
    threads = ThreadPoolExecutor(_MAX_HANDSHAKES)
    try:
        while awaited - peers.keys():
            if time.monotonic() > deadline:
                missing = sorted(awaited - peers.keys())
                raise ConfigError(f"the ranks {missing} did not connect within {_MEETING_S} s")
            greetings = {greeting for greeting in greetings if not greeting.done()}
            if len(greetings) == _MAX_HANDSHAKES:
                wait(greetings, timeout=_ACCEPT_S, return_when="FIRST_COMPLETED")
                continue
            listener.settimeout(_ACCEPT_S)
            try:
                plain, _ = listener.accept()
            except OSError:
                continue
            greetings.add(threads.submit(greet, plain))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return peers


def _greeting(peer: ssl.SSLSocket, token: bytes) -> int | None:
    """The rank of a peer that knows the token."""
    greeting = b""
    while len(greeting) < _RANK.size + len(token):
        received = peer.recv(_RANK.size + len(token) - len(greeting))
        if not received:
            return None
        greeting += received
    is_known = hmac.compare_digest(greeting[_RANK.size :], token)
    return _RANK.unpack_from(greeting)[0] if is_known else None


def _set_options(plain: socket.socket) -> None:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        plain.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    # Not TCP_USER_TIMEOUT: it would also end the connection to a rank that computes for long and reads nothing.
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        plain.setsockopt(socket.IPPROTO_TCP, option, _SILENCE_S // (_PROBES + 1))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
