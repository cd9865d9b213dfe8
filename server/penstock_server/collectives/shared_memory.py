"""Tensors of the ranks of one host are exchanged through memory that their processes share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock_server.collectives.distributed import Distributed, gather_numbers, number_of

if TYPE_CHECKING:
    from penstock_server.kernels.native_build import NativeBuild

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = Path("/proc/self/ns/pid")
_NOWHERE = 0  # the place of a rank that cannot share memory


class SharedMemory:
    """Memory of the ranks of one host. Implements `Collectives`. Raises RuntimeError when another rank's process has
    exited."""

    def __init__(self, native: Any, rank: int, size: int) -> None:
        self.native = native
        self._gather = native.gather
        self._rank = rank
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._of_all(x)
        x.copy_(first)
        for other in others:
            x += other  # in the order of the ranks, so that all get the same sum
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        row = x.view(1, -1)
        widths = [row.shape[1], *[0] * (self._size - 1)]
        if self._rank == 0:
            self._gather(row, widths)
        else:
            self._gather(row[:, :0], widths, row)
        return x

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        joined = x.new_empty((x.shape[0], sum(widths)))
        self._gather(x, widths, joined)
        return joined

    def minimum(self, value: int) -> int:
        return int(self._of_all(torch.tensor([value])).min())

    def _of_all(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]"""
        return self.all_gather_columns(x.view(1, -1), (x.numel(),) * self._size).view(self._size, *x.shape)


def share(
    rank: int, size: int, native: NativeBuild | None, group: dist.ProcessGroup | None = None
) -> tuple[SharedMemory | None, str]:
    """The collectives, the same on all ranks, or why there are none. native: without it, there are none. group: as of
    `connect`."""
    if native is None:
        gather_numbers(_NOWHERE, 0, 0, group=group)
        return None, "penstock_kernels has no kernels for this data type"
    Collective = native.module.Collective  # noqa: N806
    # The file has no name and ends with its processes. It does not count against the size of /dev/shm.
    memory = os.memfd_create("penstock ranks")
    with os.fdopen(memory, "rb+"):
        os.ftruncate(memory, Collective.memory_bytes(size))
        places, pids, files = gather_numbers(_place(), os.getpid(), memory, group=group)
        if len(set(places)) > 1 or _NOWHERE in places:
            return None, "they are not all on one host and in one process namespace"
        collective, reason = None, "another rank cannot map the memory"
        try:
            with open(f"/proc/{pids[0]}/fd/{files[0]}", "rb+", buffering=0) as opened:
                collective = Collective(rank, pids, opened.fileno())
        except OSError as error:
            reason = f"rank {rank} cannot map the memory of rank 0: {error}"
        # Rank 0 closes its file after all have opened it.
        if Distributed(group).minimum(collective is not None) and collective is not None:
            return SharedMemory(collective, rank, size), ""
        return None, reason


def _place() -> int:
    """A number of this host and process namespace, in which a pid means the same process to all ranks."""
    try:
        text = _BOOT_ID.read_text() + os.readlink(_PROCESS_IDS)
    except OSError:
        return _NOWHERE
    return number_of(text)
