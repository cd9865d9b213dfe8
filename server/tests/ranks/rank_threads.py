"""Ranks as threads of one process, for tests of layers: collectives go through a table, or through `SharedMemory`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from native_builds import build
from penstock_server.collectives.shared_memory import SharedMemory
from penstock_server.parallel import RankGroup
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadGroup(RankGroup):
    """One rank's view. Sums are computed in rank order, in the tensors' dtype."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    table: list[Tensor | None] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])

    def minimum(self, value: int) -> int:
        return min(int(part) for part in self._exchange(torch.tensor(value)))

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.table[self.rank] = x.clone()
        self.barrier.wait()
        parts = [part for part in self.table if part is not None]
        self.barrier.wait()
        return parts


def run_ranks(size: int, of_rank: Callable[[RankGroup], T]) -> list[T]:
    """The function's result on every rank."""
    barrier, table = threading.Barrier(size, timeout=60), [None] * size
    results: list[T | BaseException] = [RuntimeError("not run")] * size

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = of_rank(ThreadGroup(rank, size, barrier=barrier, table=table))  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Raise the cause before the barriers that it broke.
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [result for result in results if not isinstance(result, BaseException)]


def run_native_ranks(size: int, of_rank: Callable[[RankGroup], T]) -> list[T]:
    """The same with the collectives of native ranks. Only a test's timeout ends it when a single rank fails."""
    Collective = build().module.Collective
    memory = os.memfd_create("ranks")
    with os.fdopen(memory, "rb+"):
        os.ftruncate(memory, Collective.memory_bytes(size))
        pids = [os.getpid()] * size
        groups = [
            RankGroup(rank, size, SharedMemory(Collective(rank, pids, memory), rank, size)) for rank in range(size)
        ]
    return run_ranks(size, lambda group: of_rank(groups[group.rank]))
