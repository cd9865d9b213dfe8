"""What the launcher asks of Ray. `integration-tests/test_ray.py` has a real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import penstock_server.process.ray
import pytest
from penstock_server.engine.device import choose_num_threads
from penstock_server.errors import ConfigError
from penstock_server.process.ray import Order, Placement, Reports, cpus_per_rank, place
from penstock_server.protocol.config import LoadConfig


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "each"),
    [([8, 8], 2, 8), ([8, 8], 3, 4), ([8], 3, 2), ([16, 2], 2, 8), ([1, 1], 2, 1), ([0, 4], 4, 1)],
)
def test_each_rank_gets_the_most_cpus_with_which_all_ranks_fit(cpus: list[int], num_ranks: int, each: int) -> None:
    assert cpus_per_rank(cpus, num_ranks) == each
    assert sum(machine // (each + 1) for machine in cpus) < num_ranks


@pytest.mark.parametrize("cpus", [[], [0], [1, 1]])
def test_a_cluster_with_fewer_cpus_than_ranks_is_refused(cpus: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"has {sum(cpus)} CPUs, must have at least one for each of 3 ranks"):
        cpus_per_rank(cpus, 3)


@pytest.mark.parametrize(
    ("cpus", "gpus", "num_ranks", "each"),
    [
        ([8, 8], [1, 1], 2, 8),
        ([8, 8], [2, 0], 2, 4),
        ([16, 16], [1, 3], 4, 5),
        ([64, 2], [0, 2], 2, 1),
        ([64, 64], [8, 8], 8, 8),
    ],
)
def test_ranks_on_gpus_are_on_as_few_machines_as_have_them(
    cpus: list[int], gpus: list[int], num_ranks: int, each: int
) -> None:
    assert cpus_per_rank(cpus, num_ranks, gpus=gpus) == each


def test_a_cluster_with_fewer_gpus_than_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 16 CPUs and 2 GPUs, must have at least one of both .* of 3 ranks"):
        cpus_per_rank([8, 8], 3, gpus=[1, 1])
    with pytest.raises(ConfigError, match="has 8 CPUs and 2 GPUs"):
        cpus_per_rank([8, 0], 2, gpus=[1, 1])  # one machine has a GPU and no CPU


@pytest.mark.parametrize(
    ("cpus", "gpus", "each"),
    [([8, 8], None, 4), ([16, 2], None, 4), ([6, 3], None, 1), ([64, 64], [2, 2], 32), ([64, 64], [4, 0], 16)],
)
def test_the_ranks_of_a_stage_share_a_machine(cpus: list[int], gpus: list[int] | None, each: int) -> None:
    assert cpus_per_rank(cpus, 2, 2, gpus) == each


@pytest.mark.parametrize(("cpus", "gpus"), [([3, 1], None), ([1, 1, 1, 1], None), ([64, 64], [3, 1])])
def test_a_cluster_without_room_for_a_stage_on_one_machine_is_refused(cpus: list[int], gpus: list[int] | None) -> None:
    with pytest.raises(ConfigError, match="for each of 4 ranks, and room for the 2 ranks of a stage on one machine"):
        cpus_per_rank(cpus, 2, 2, gpus)


def test_a_cluster_without_tls_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "0", "no"):
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
        if value is not None:
            monkeypatch.setenv("RAY_USE_TLS", value)
        with pytest.raises(ConfigError, match="RAY_USE_TLS is not 1"):
            place(Order("127.0.0.1:1", 1, "a secret"), pytest.fail)


def test_a_cluster_that_rejects_the_token_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class AuthenticationError(Exception):
        """Derives from Ray's own error alone."""

    def init(**_: object) -> None:
        raise AuthenticationError("no token")

    ray = SimpleNamespace(init=init, exceptions=SimpleNamespace(RayError=AuthenticationError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(ConfigError, match="the Ray cluster at head:6379 cannot be joined: no token"):
        place(Order("head:6379", 1, "a secret"), pytest.fail)


def test_an_order_that_is_incomplete_is_refused_without_being_printed() -> None:
    whole = {"cluster": "head:6379", "num_nodes": 2, "ranks_per_node": 4, "secret": "hunter2", "uses_gpus": True}
    assert Order.parse(json.dumps(whole)) == Order("head:6379", 2, "hunter2", uses_gpus=True, ranks_per_node=4)
    for order in (
        {**whole, "num_nodes": 0},
        {**whole, "ranks_per_node": 0},
        {**whole, "cluster": None},
        {**whole, "uses_gpus": 1},
        ["hunter2"],
    ):
        with pytest.raises(ConfigError) as refusal:
            Order.parse(json.dumps(order))
        assert "hunter2" not in str(refusal.value)


class RayError(Exception):
    """Error of the fake Ray below, like the next one."""


class RayTaskError(RayError):
    cause = "no such file: penstock"


class Ended(BaseException):
    """The script of a fake Ray is over."""


def fake_ray(monkeypatch: pytest.MonkeyPatch, starts: list[str | Exception]) -> list[dict[str, Any]]:
    """`starts`: the address or the error of each actor's start. A node ends as soon as it has started. Returns what Ray
    is asked for: first the bundles of the placement group, then the options of each actor."""
    asked: list[dict[str, Any]] = []

    async def start(*_: Any) -> str:
        if not starts:
            raise Ended
        found = starts.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def wait() -> str:
        return "its node has ended"

    actor = SimpleNamespace(start=SimpleNamespace(remote=start), wait=SimpleNamespace(remote=wait))

    def with_options(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(remote=lambda: actor)

    options = SimpleNamespace(options=with_options)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_: None)
    ray: Any = ModuleType("ray")
    group = lambda bundles, strategy: asked.append({"bundles": bundles, "strategy": strategy})  # noqa: E731
    ray.util = SimpleNamespace(placement_group=group, scheduling_strategies=strategies)
    ray.remote = lambda _: options
    exceptions: Any = ModuleType("ray.exceptions")
    exceptions.RayError, exceptions.RayTaskError = RayError, RayTaskError
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.setattr(penstock_server.process.ray, "_RETRY_S", 0.0)
    return asked


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("uses_gpus", [False, True])
def test_a_rank_has_a_gpu_if_asked(uses_gpus: bool, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_ray(monkeypatch, ["node://a:1"])
    with pytest.raises(Ended):
        asyncio.run(Placement(Order("head:6379", 1, "a secret", uses_gpus, ranks_per_node), 4, lambda _: None).keep())
    group, actor, *_ = asked
    cpus, gpus = 4 * ranks_per_node, ranks_per_node if uses_gpus else 0
    assert group["bundles"] == [{"CPU": cpus, "GPU": gpus} if uses_gpus else {"CPU": cpus}]
    assert (actor["num_cpus"], actor["num_gpus"]) == (cpus, gpus)


def test_a_replacement_that_cannot_run_a_node_is_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray(monkeypatch, ["node://a:1", RayTaskError(), RayError("the actor\n died"), "node://b:1"])
    reports: list[dict[str, Any]] = []
    with pytest.raises(Ended):
        asyncio.run(Placement(Order("head:6379", 1, "a secret"), 1, reports.append).keep())
    unable = "a machine of the Ray cluster cannot run `penstock node`: no such file: penstock"
    assert reports == [
        {"placed": {"node": 0, "address": "node://a:1"}},
        {"lost": {"node": 0, "reason": "its node has ended"}},
        {"lost": {"node": 0, "reason": unable}},
        {"lost": {"node": 0, "reason": "the actor died"}},
        {"placed": {"node": 0, "address": "node://b:1"}},
        {"lost": {"node": 0, "reason": "its node has ended"}},
    ]


def test_a_first_machine_that_cannot_run_a_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray(monkeypatch, [RayError("the actor died"), RayTaskError()])
    reports: list[dict[str, Any]] = []
    with pytest.raises(ConfigError, match="cannot run `penstock node`: no such file: penstock"):
        asyncio.run(Placement(Order("head:6379", 1, "a secret"), 1, reports.append).keep())
    assert reports == [{"lost": {"node": 0, "reason": "the actor died"}}]


def test_what_ray_prints_is_not_a_report(capfd: pytest.CaptureFixture[str]) -> None:
    report = Reports()
    os.write(1, b"a message of Ray\n")
    report({"lost": {"node": 0, "reason": "it is gone"}})
    captured = capfd.readouterr()
    assert captured.out == '{"lost": {"node": 0, "reason": "it is gone"}}\n'
    assert "a message of Ray" in captured.err


def test_a_rank_has_the_threads_that_its_node_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_num_threads(LoadConfig(Path("model")), 2) == 3
    assert choose_num_threads(LoadConfig(Path("model"), num_threads=2), 2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # values for nested sections
    assert choose_num_threads(LoadConfig(Path("model")), 2) >= 1
