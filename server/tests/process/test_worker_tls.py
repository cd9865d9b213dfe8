"""A worker on TCP answers only peers with a certificate of its authority, and loads a model only with its token. Ranks
of several machines exchange tensors over TLS, with the bits of one machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import torch
from penstock_server.collectives import Ranks, meet, open_store
from penstock_server.collectives.network import Network
from penstock_server.errors import ConfigError
from penstock_server.pb import worker_pb2 as pb
from penstock_server.pb import worker_pb2_grpc as rpc
from penstock_server.process.service import Worker, start_server
from penstock_server.protocol.config import Node, WorkerConfig
from penstock_server.protocol.endpoint import WORKER_NAME, TcpEndpoint, Tls
from penstock_server.protocol.message import PROTOCOL_VERSION
from tls_files import make_tls, needs_openssl
from torch import Tensor

pytestmark = needs_openssl
TIMEOUT_S = 240
TOKEN = "a token"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Credentials of another group."""
    return make_tls(tmp_path_factory.mktemp("other"))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that stays bound, as a node's."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture(scope="module")
def port(tls: Tls) -> Iterator[int]:
    with reserved_port() as port:
        endpoint = TcpEndpoint("127.0.0.1", port, tls)
        server = start_server(Worker(WorkerConfig(endpoint, token=TOKEN)), endpoint)
        yield port
        server.stop()


def stub(port: int, tls: Tls, authority: str, *, shows_certificate: bool = True) -> rpc.WorkerStub:
    own = (tls.key.encode(), tls.certificate.encode()) if shows_certificate else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.encode(), *own)
    options = [("grpc.ssl_target_name_override", WORKER_NAME)]
    return rpc.WorkerStub(grpc.secure_channel(f"127.0.0.1:{port}", credentials, options))


def test_only_a_peer_with_a_certificate_of_the_authority_is_answered(port: int, tls: Tls, other: Tls) -> None:
    stub(port, tls, tls.authority).Health(pb.HealthRequest(), timeout=TIMEOUT_S)
    strangers = [
        stub(port, tls, tls.authority, shows_certificate=False),
        stub(port, other, tls.authority),
        rpc.WorkerStub(grpc.insecure_channel(f"127.0.0.1:{port}")),
    ]
    for stranger in strangers:
        with pytest.raises(grpc.RpcError) as error:
            stranger.Health(pb.HealthRequest(), timeout=TIMEOUT_S)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


def test_load_needs_the_token_of_the_worker(port: int, tls: Tls) -> None:
    for token in ("", "another token"):
        request = pb.LoadRequest(protocol_version=PROTOCOL_VERSION, token=token)
        with pytest.raises(grpc.RpcError) as error:
            stub(port, tls, tls.authority).Load(request, timeout=TIMEOUT_S)
        assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED


def together(tls: list[Tls], tokens: list[str]) -> list[Network]:
    """Ranks, each with its own credentials, that meet."""
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in tls]
        rendezvous = "tls://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        nodes = [
            Node(0, 1, ("127.0.0.1", port), *credentials)
            for port, credentials in zip(ports, zip(tls, tokens, strict=True), strict=True)
        ]
        with ThreadPoolExecutor(len(tls)) as threads:
            ranks = range(len(tls))
            return list(threads.map(lambda rank: meet(rank, len(tls), rendezvous, nodes[rank]), ranks))


def part(rank: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + width)
    return torch.randn((rows, 2 * width), generator=generator).mul(100).to(dtype)[:, :width]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_several_machines_get_the_same_tensors_in_the_order_of_the_ranks(size: int, tls: Tls) -> None:
    networks = together([tls] * size, [TOKEN] * size)

    def exchange(network: Network) -> list[Tensor]:
        rank, found = network._rank, []
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            for rows, unit in ((1, 5), (0, 5), (7, 1), (600, 401)):
                widths = tuple(unit * (1 + rank) for rank in range(size))
                found.append(network.all_gather_columns(part(rank, rows, widths[rank], dtype), widths))
                found.append(network.all_reduce(part(rank, rows, unit, dtype).contiguous()))
                found.append(network.broadcast(part(rank, rows, unit, dtype).contiguous()))
        found.append(torch.tensor(network.minimum(10 - rank)))
        return found

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(exchange, networks))
    expected = []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        for rows, unit in ((1, 5), (0, 5), (7, 1), (600, 401)):
            expected.append(torch.cat([part(rank, rows, unit * (1 + rank), dtype) for rank in range(size)], dim=1))
            total = part(0, rows, unit, dtype).contiguous()
            for rank in range(1, size):
                total += part(rank, rows, unit, dtype)
            expected += [total, part(0, rows, unit, dtype)]
    expected.append(torch.tensor(11 - size))
    for found in results:
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_stages_and_links_take_turns_on_the_connections_of_all_ranks(tls: Tls) -> None:
    networks = together([tls] * 4, [TOKEN] * 4)

    def run(network: Network) -> list[list[float]]:
        """Rows of each step, which the ranks of the first stage, the last two, send to the others."""
        rank, found = network._rank, []
        ranks = Ranks(rank, 4, network, None, Node(rank % 2, 2, ("127.0.0.1", 1), tls, TOKEN), 2)
        groups = [ranks.group(numbers) for numbers in ((0, 1), (2, 3), (2, 0), (3, 1))]
        stage, link = [group for group in groups if group is not None]
        for step in range(3):
            rows = torch.full((3, 40_000), 10.0 * step + rank)
            link.broadcast(rows)
            found.append([rows.unique().item(), stage.all_reduce(rows.clone()).unique().item()])
            assert network.minimum(5 - rank) == 2
        return found

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(run, networks))
    for rank, found in enumerate(results):
        assert found == [[10 * step + rank % 2 + 2, 20 * step + 5] for step in range(3)]


def test_a_rank_of_a_link_that_is_gone_has_its_number_in_the_model(tls: Tls) -> None:
    networks = together([tls] * 3, [TOKEN] * 3)
    for peer in networks[2]._peers.values():
        peer.close()
    with pytest.raises(RuntimeError, match="rank 2"):
        networks[0].part((2, 0)).broadcast(torch.zeros(4))


def test_ranks_on_gpus_of_several_machines_meet_at_a_store_whose_port_they_learn_over_tls(tls: Tls) -> None:
    networks, node = together([tls] * 3, [TOKEN] * 3), Node(0, 1, ("127.0.0.1", 1), tls, TOKEN)
    with ThreadPoolExecutor(3) as threads:
        stores = list(
            threads.map(lambda rank: open_store(networks[rank], rank, 3, "tls://127.0.0.1:1", node), range(3))
        )
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", stores[0].port))  # it listens at the address of rank 0 alone
    stores[1].set("a key", "a value")
    assert [store.get("a key") for store in stores] == [b"a value"] * 3


def test_a_rank_that_is_gone_is_named(tls: Tls) -> None:
    first, second = together([tls] * 2, [TOKEN] * 2)
    for peer in second._peers.values():
        peer.close()
    with pytest.raises(RuntimeError, match="rank 1"):
        first.minimum(0)


@pytest.mark.parametrize("lacks", ["token", "certificate"])
def test_a_stranger_does_not_become_a_rank(lacks: str, tls: Tls, other: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_server.collectives.network._MEETING_S", 1.0)
    credentials = ([tls, tls], [TOKEN, "b token"]) if lacks == "token" else ([tls, other], [TOKEN, TOKEN])
    with pytest.raises(ConfigError, match=r"ranks \[1\] did not connect|rank 0 .* was not reached"):
        together(*credentials)


def test_a_rendezvous_that_cannot_be_used_is_named(tls: Tls) -> None:
    node = Node(0, 1, ("127.0.0.1", 1), tls, TOKEN)
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        meet(0, 2, "tls://here,there", node)
    with pytest.raises(ConfigError, match="has 1 addresses, must have one for each of 2 ranks"):
        meet(0, 2, "tls://here:1", node)
