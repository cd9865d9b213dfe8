"""Tensors of the ranks of one host are exchanged through memory that their processes share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock_server.collectives.distributed import number_of
from penstock_server.collectives.gathered import Gathered
from penstock_server.collectives.interface import Collectives

if TYPE_CHECKING:
    from penstock_server.device.native.build import NativeBuild

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = Path("/proc/self/ns/pid")
_NOWHERE = 0  # the place of a rank that cannot share memory


class SharedMemory(Gathered):
    """Memory of the ranks of one host. Raises RuntimeError when another rank's process has exited."""

    def __init__(self, native: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.native = native

    def _gather(self, x: Tensor, widths: Sequence[int], joined: Tensor | None = None) -> None:
        self.native.gather(x, widths, *([] if joined is None else [joined]))


def share(rank: int, size: int, native: NativeBuild | None, among: Collectives) -> tuple[SharedMemory | None, str]:
    """The collectives, the same on all ranks, or why there are none. native: without it, there are none. among: through
    which the ranks agree."""
    if native is None:
        _gather_numbers(among, size, _NOWHERE, 0, 0)
        return None, "penstock_kernels has no kernels for this data type"
    Collective = native.module.Collective  # noqa: N806
    # The file has no name and ends with its processes. It does not count against the size of /dev/shm.
    memory = os.memfd_create("penstock ranks")
    with os.fdopen(memory, "rb+"):
        os.ftruncate(memory, Collective.memory_bytes(size))
        places, pids, files = _gather_numbers(among, size, _place(), os.getpid(), memory)
        if len(set(places)) > 1 or _NOWHERE in places:
            return None, "they are not all on one host and in one process namespace"
        collective, reason = None, "another rank cannot map the memory"
        try:
            with open(f"/proc/{pids[0]}/fd/{files[0]}", "rb+", buffering=0) as opened:
                collective = Collective(rank, pids, opened.fileno())
        except OSError as error:
            reason = f"rank {rank} cannot map the memory of rank 0: {error}"
        # Rank 0 closes its file after all have opened it.
        if among.minimum(collective is not None) and collective is not None:
            return SharedMemory(collective, rank, size), ""
        return None, reason


def _gather_numbers(among: Collectives, size: int, *numbers: int) -> list[list[int]]:
    """For each number, its values by rank."""
    joined = among.all_gather_columns(torch.tensor([numbers]), (len(numbers),) * size)
    return joined.view(size, len(numbers)).T.tolist()


def _place() -> int:
    """A number of this host and process namespace, in which a pid means the same process to all ranks."""
    try:
        text = _BOOT_ID.read_text() + os.readlink(_PROCESS_IDS)
    except OSError:
        return _NOWHERE
    return number_of(text)
