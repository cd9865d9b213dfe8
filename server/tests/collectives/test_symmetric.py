"""When ranks on GPUs add tensors in each other's memory, with fakes of the devices and of torch.distributed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from penstock_server.collectives import computes_alike, connect_gpus, symmetric
from penstock_server.collectives.distributed import Distributed
from penstock_server.collectives.symmetric import MAX_BYTES, SymmetricMemory
from torch import Tensor

SIZE = 2


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of two. Its tensors are on the CPU, and rank 1 is always of the same opinion."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    monkeypatch.setattr(symmetric, "_device", lambda: torch.device("cpu", 0))
    monkeypatch.setattr(Distributed, "minimum", lambda self, value: int(value))
    world = type("World", (), {"group_name": "0"})
    monkeypatch.setattr(dist, "group", type("Group", (), {"WORLD": world}))
    monkeypatch.setattr(symmetric_memory, "empty", lambda num, dtype, device: torch.empty(num, dtype=dtype))
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda buffer, name: None)
    kernel_returns(monkeypatch, lambda mine: mine + 2)  # rank 1 has ones more than rank 0, which has ones


def kernel_returns(monkeypatch: pytest.MonkeyPatch, summed: Callable[[Tensor], Tensor]) -> None:
    library = type("Library", (), {"one_shot_all_reduce": staticmethod(lambda mine, kind, name: summed(mine))})
    monkeypatch.setattr(symmetric, "_operators", lambda: library)


def test_ranks_that_can_read_each_other_share_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert type(connect_gpus(0, SIZE)) is SymmetricMemory
    assert "add tensors of up to 512 KiB in each other's memory" in caplog.text


@pytest.mark.parametrize("asked", [False, True])
def test_devices_that_cannot_read_each_other_use_nccl(
    asked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asked: this rank could, but another one cannot."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: asked)
    monkeypatch.setattr(Distributed, "minimum", lambda self, value: 0)
    with caplog.at_level(logging.INFO):
        assert type(connect_gpus(0, SIZE)) is Distributed
    expected = "another rank cannot share" if asked else "device 0 cannot read the memory of device 1"
    assert f"by NCCL: {expected}" in caplog.text


def test_a_wrong_sum_means_nccl(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernel_returns(monkeypatch, lambda mine: mine)
    assert type(connect_gpus(0, SIZE)) is Distributed
    assert "a sum was 1.0, not 3.0" in caplog.text


def test_a_failed_rendezvous_means_nccl(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA driver error: peer access is not supported\nmore")

    monkeypatch.setattr(symmetric_memory, "rendezvous", refuse)
    assert type(connect_gpus(0, SIZE)) is Distributed
    assert "by NCCL: CUDA driver error: peer access is not supported" in caplog.text


def test_only_small_sums_of_floats_are_made_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    by_nccl: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: by_nccl.append(x.numel()))
    shared = SymmetricMemory(torch.zeros(MAX_BYTES, dtype=torch.uint8), lambda mine: 2 * mine)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(3, 16, dtype=dtype)
        assert shared.all_reduce(x) is x
        assert torch.equal(x, torch.full_like(x, 2))
    largest = torch.ones(MAX_BYTES // 4)
    assert shared.all_reduce(largest)[-1] == 2
    assert not by_nccl
    for x in (torch.ones(MAX_BYTES // 4 + 4), torch.ones(3), torch.ones(0, 16), torch.ones(16, dtype=torch.int64)):
        shared.all_reduce(x)
    assert by_nccl == [MAX_BYTES // 4 + 4, 3, 0, 16]


@pytest.mark.parametrize(("other", "expected"), [("NVIDIA H200", True), ("NVIDIA A100", False)])
def test_ranks_compute_alike_on_gpus_of_one_kind(
    other: str, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = iter(["NVIDIA H200", other])

    def properties(device: int) -> Any:
        return type("Properties", (), {"name": next(names), "major": 9, "minor": 0, "multi_processor_count": 132})

    said: list[int] = []

    def minimum(collectives: Distributed, value: int) -> int:
        """What rank 0 says first, then rank 1 in a group that knows it."""
        said.append(value)
        return min(value, *(first * (1 if value > 0 else -1) for first in said[:1]))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(Distributed, "minimum", minimum)
    assert computes_alike(Distributed(), None), "rank 0 alone"
    assert computes_alike(Distributed(), None) == expected
    assert ("GPUs of several kinds" in caplog.text) != expected
