"""`python -m penstock_server.process.ray`: asks a Ray cluster for the nodes of a server. Needs the extra `ray`.

Reads one line from stdin, {"cluster": "HOST:PORT", "num_nodes", "ranks_per_node", "secret", "uses_gpus"}, and prints
JSON lines:

    {"placed": {"node", "address"}}     `penstock node` listens at node://HOST:PORT
    {"lost": {"node", "reason"}}        it has ended; the node is placed again

The nodes share a placement group with a bundle of CPUs for each, and of a GPU for each of its ranks if asked, so that
either all of them have a machine or none has. An actor in each bundle runs `penstock node`. This process exits when
stdin ends; its actors and their nodes end with it. On failure it prints a line to stderr that starts with "error: ".
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock_server.errors import ConfigError
from penstock_server.host import log

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # after the loss of an actor, whose bundle Ray has to move first


@dataclass(frozen=True, slots=True)
class Order:
    """What the launcher asks for."""

    cluster: str
    num_nodes: int
    secret: str
    uses_gpus: bool = False
    ranks_per_node: int = 1

    @classmethod
    def parse(cls, line: str) -> Order:
        match json.loads(line):
            case {
                "cluster": str(cluster),
                "num_nodes": int(num_nodes),
                "ranks_per_node": int(ranks_per_node),
                "secret": str(secret),
                "uses_gpus": bool(uses_gpus),
            } if min(num_nodes, ranks_per_node) > 0:
                return cls(cluster, num_nodes, secret, uses_gpus, ranks_per_node)
        raise ConfigError("the line on stdin is not an order")


class NodeActor:
    """Runs `penstock node` on the machine of this actor."""

    def start(self, secret: str, num_threads: int, uses_gpus: bool) -> str:
        """Returns the node's address. num_threads: of each rank. uses_gpus: those that Ray gave to this actor. Raises
        RuntimeError if it does not start."""
        import ray

        source, sink = os.pipe()
        os.write(sink, secret.encode())
        os.close(sink)
        # Without the cluster's token, which a model's own code must not read.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"OMP_NUM_THREADS": str(num_threads)}
        if not uses_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        host = ray.util.get_node_ip_address()
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        arguments = ["--listen", listen, "--secret-file", f"/dev/fd/{source}", "--json-output", "--stop-with-stdin"]
        arguments += ["--unencrypted-gpus"] * uses_gpus
        # Its stdin ends when this process does, however that happens.
        self._node = subprocess.Popen(  # noqa: S603 - our own binary
            [Path(sys.executable).with_name("penstock"), "node", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            pass_fds=[source],
        )
        os.close(source)
        lines = []
        for line in self._node.stdout or ():
            lines.append(line)
            if url := _url(line):
                threading.Thread(target=self._log, daemon=True).start()
                return url
        raise RuntimeError(f"`penstock node` did not start: {' '.join(lines).strip()}")

    def wait(self) -> str:
        """Returns, when the node has ended, a sentence that says how."""
        return f"`penstock node` exited with status {self._node.wait()}"

    def _log(self) -> None:
        """Passes the node's log on to the log of this actor, which Ray keeps."""
        for line in self._node.stdout or ():
            print(line, end="", file=sys.stderr)


def _url(line: str) -> str | None:
    try:
        return json.loads(line)["fields"].get("url")
    except (ValueError, LookupError, TypeError):
        return None


def cpus_per_rank(
    cpus: Sequence[int], num_nodes: int, ranks_per_node: int = 1, gpus: Sequence[int] | None = None
) -> int:
    """The most CPUs that each rank can have, on machines with `cpus` of them, each of which has room for whole nodes.
    gpus: of each machine, of which each rank needs one, on as few machines as can be; None: it needs none. Raises
    ConfigError if there are too few."""
    ranks = cpus if gpus is None else list(map(min, cpus, gpus))
    most = [num_ranks // ranks_per_node for num_ranks in ranks]  # nodes of each machine
    machines = sorted(zip(most, cpus, strict=True), reverse=True)
    if gpus is not None:
        sums = list(itertools.accumulate(limit for limit, _ in machines))
        machines = machines[: bisect_left(sums, num_nodes) + 1]
    for each in range(max(cpus, default=0), 0, -1):
        if sum(min(num_cpus // (each * ranks_per_node), limit) for limit, num_cpus in machines) >= num_nodes:
            return each
    found, needed = f"{sum(cpus)} CPUs", "one"
    if gpus is not None:
        found, needed = f"{found} and {sum(gpus)} GPUs", "one of both on the same machine"
    number = f"{num_nodes * ranks_per_node} ranks"
    if ranks_per_node > 1:
        number += f", and room for the {ranks_per_node} ranks of a stage on one machine"
    raise ConfigError(f"the Ray cluster has {found}, must have at least {needed} for each of {number}")


class Placement:
    """Keeps an actor alive for each node, and reports where it is."""

    def __init__(self, order: Order, num_cpus: int, report: Callable[[dict[str, Any]], None]) -> None:
        import ray

        self._ray, self._report = ray, report
        self._order, self._num_threads = order, num_cpus
        self._num_cpus = num_cpus * order.ranks_per_node
        self._num_gpus = order.ranks_per_node * order.uses_gpus
        # GPUs of one machine exchange tensors faster; a rank on CPUs needs the memory of a machine.
        bundle = {"CPU": self._num_cpus} | ({"GPU": self._num_gpus} if order.uses_gpus else {})
        self._group = ray.util.placement_group(
            [bundle] * order.num_nodes, strategy="PACK" if order.uses_gpus else "SPREAD"
        )

    async def keep(self) -> NoReturn:
        await asyncio.gather(*map(self._keep, range(self._order.num_nodes)))
        raise AssertionError("a node is placed for ever")

    async def _keep(self, node: int) -> NoReturn:
        """Raises ConfigError if the first machine cannot run the node. A later one that cannot is only reported as
        lost, because the other nodes would end with this process."""
        from ray.exceptions import RayError, RayTaskError

        was_placed = False
        while True:
            try:
                actor = await self._place(node)
                was_placed = True
                reason = await actor.wait.remote()
            except RayTaskError as error:
                reason = f"a machine of the Ray cluster cannot run `penstock node`: {error.cause}"
                if not was_placed:
                    raise ConfigError(reason) from error
            except RayError as error:
                reason = " ".join(str(error).split())
            self._report({"lost": {"node": node, "reason": reason}})
            await asyncio.sleep(_RETRY_S)

    async def _place(self, node: int) -> Any:
        """Starts an actor and returns it when its node listens. Raises RayError if the actor ends before, RayTaskError
        if it cannot start the node."""
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, node)
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "num_gpus": self._num_gpus, "scheduling_strategy": place}
        actor: Any = self._ray.remote(NodeActor).options(**options).remote()
        address = await actor.start.remote(self._order.secret, self._num_threads, self._order.uses_gpus)
        self._report({"placed": {"node": node, "address": address}})
        return actor


class Reports:
    """Lines for the launcher. Ray prints to stdout too: its lines go to stderr from now on."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def __call__(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._file)


def place(order: Order, report: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Joins the cluster and places the nodes until the process exits. Raises ConfigError."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        raise ConfigError(
            "RAY_USE_TLS is not 1: the secret of the ranks' connections crosses the network between Ray's processes; "
            "set up TLS for the cluster, and start the server with the same RAY_* variables"
        )
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--ranks-on ray:// needs Ray: pip install '.[ray]' in the source tree of Penstock ({error})"
        ) from error
    try:
        ray.init(address=order.cluster, log_to_driver=False, logging_level=logging.WARNING, namespace="penstock")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(f"the Ray cluster at {order.cluster} cannot be joined: {error}") from error
    cpus, gpus = (
        [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]] for kind in ("CPU", "GPU")
    )
    num_cpus = cpus_per_rank(cpus, order.num_nodes, order.ranks_per_node, gpus if order.uses_gpus else None)
    nodes = f"{order.num_nodes} node(s) of {order.ranks_per_node} rank(s)"
    each = f"{num_cpus} CPU(s)" + " and a GPU" * order.uses_gpus
    logger.info("Ray is asked for %s with %s each; `ray status` shows what it lacks", nodes, each)
    asyncio.run(Placement(order, num_cpus, report).keep())
    raise AssertionError("a node is placed for ever")


def main() -> int:
    def exit_with_stdin() -> NoReturn:
        sys.stdin.read()
        os._exit(0)  # the cluster notices, and ends the actors

    log.configure()
    try:
        order = Order.parse(sys.stdin.readline())
        threading.Thread(target=exit_with_stdin, daemon=True).start()
        place(order, Reports())
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # Actors of a class in __main__ would need its source: they import this module instead.
    from penstock_server.process.ray import main as run

    sys.exit(run())
