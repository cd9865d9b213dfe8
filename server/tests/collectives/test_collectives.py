"""Ranks of one host, each a process, exchange tensors through shared memory, with the results of torch.distributed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from program_environment import program_environment
from tiny_models import make_model, save_model

PROGRAM = Path(__file__).parents[1] / "programs" / "collective_program.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("penstock_kernels") is None, reason="needs penstock_kernels")


@contextmanager
def ranks(action: str, size: int, place: Path) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), action, str(rank), str(size), f"file://{place}/rendezvous"],
            env=program_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    found = [process.communicate() for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors for _, errors in found)
    return [output.strip() for output, _ in found]


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_gives_the_tensors_of_torch_distributed(size: int, tmp_path: Path) -> None:
    with ranks("compare", size, tmp_path) as processes:
        assert outputs(processes) == ["equal"] * size


def test_ranks_of_several_hosts_use_torch_distributed(tmp_path: Path) -> None:
    with ranks("apart", 2, tmp_path) as processes:
        assert outputs(processes) == ["Distributed"] * 2


@pytest.mark.parametrize(
    ("action", "num_calls"), [("outlive", 1), pytest.param("outlive in step", 2, marks=pytest.mark.native)]
)
def test_a_rank_notices_that_another_one_was_killed(action: str, num_calls: int, tmp_path: Path) -> None:
    save_model(make_model("llama-head-dim"), tmp_path)
    with ranks(action, 2, tmp_path) as (first, second):
        assert first.stdout is not None
        assert second.stdout is not None
        assert first.stdout.readline() == second.stdout.readline() == "ready\n"
        second.kill()
        for _ in range(num_calls):
            assert first.stdout.readline() == f"rank 1 (process {second.pid}) has exited\n"
