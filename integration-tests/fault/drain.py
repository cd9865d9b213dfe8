"""Servers leave and join the list of a router at random moments while streams run."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from binary import TIMEOUT_S, Server, start

from .mix import Answer, Repeated, Request
from .probe import metric, metrics, wait_until

ENVIRONMENT = {"ENGINE_SECRET": "0123456789abcdef"}


@dataclass
class Drains:
    num_drains: int = 0
    num_handovers: int = 0
    num_answers: int = 0
    differences: list[str] = field(default_factory=list)


class ServerList:
    """The file of `--replica-file`, replaced at once, as Kubernetes replaces a ConfigMap."""

    def __init__(self, path: Path, urls: Sequence[str]) -> None:
        self.path, self.urls = path, list(urls)
        self.write(self.urls)

    def write(self, urls: Sequence[str]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{url}\n" for url in urls))
        new.rename(self.path)


def drain_servers(
    router: Server,
    servers: ServerList,
    asked: Sequence[Request],
    expected: Sequence[Answer],
    num_drains: int,
    seed: str,
) -> Drains:
    """Remove a random one of the servers from the router's list, and add it again, `num_drains` times."""
    moments, result = random.Random(seed), Drains()
    num_blocks, handovers = metric(router, "penstock_kv_blocks"), num_handovers(router)
    with Repeated(router, asked, expected) as streams:
        while result.num_drains < num_drains and streams.is_running():
            time.sleep(moments.uniform(0.0, 0.5))
            left = moments.choice(servers.urls)
            servers.write([url for url in servers.urls if url != left])
            wait_until(lambda: metric(router, "penstock_kv_blocks") < num_blocks, "the server has left")
            result.num_drains += 1
            servers.write(servers.urls)
            wait_until(lambda: metric(router, "penstock_kv_blocks") == num_blocks, "the server is used again")
    result.num_handovers = num_handovers(router) - handovers
    result.num_answers, result.differences = streams.num_answers, streams.differences
    return result


def num_handovers(router: Server) -> int:
    """Sequences that have left a server for another one."""
    samples = metrics(router).items()
    return int(sum(value for name, value in samples if name.startswith("penstock_replica_handovers{")))


def start_server(engine: str = "127.0.0.1:0", *flags: str, env: Mapping[str, str] = ENVIRONMENT) -> Server:
    timeout = ["--step-timeout", str(2 * TIMEOUT_S)]  # a pause makes no server unhealthy
    return start("--engine-listen", engine, "--standby", "off", *timeout, *flags, env=dict(env))


def engine_url(server: Server) -> str:
    records = [json.loads(line)["fields"] for line in server.lines if line.startswith("{")]
    (url,) = [record["engine"] for record in records if "engine" in record]
    return url


@contextmanager
def routed(
    folder: Path, num_servers: int, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Server, ServerList]]:
    """A router in front of servers with `flags` and `env`. Their list is in `folder`."""
    with ExitStack() as stack:
        servers = []
        for _ in range(num_servers):
            servers.append(start_server("127.0.0.1:0", *flags, env={**ENVIRONMENT, **(env or {})}))
            stack.callback(servers[-1].stop)
        listed = ServerList(folder / "servers", [engine_url(server) for server in servers])
        router = start("--replica-file", str(listed.path), env=ENVIRONMENT, command=["route"])
        stack.callback(router.stop)
        num_blocks = num_servers * metric(servers[0], "penstock_kv_blocks")
        wait_until(lambda: metric(router, "penstock_kv_blocks") == num_blocks, "every server is used")
        yield router, listed
