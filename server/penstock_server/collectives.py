"""How the ranks of one model exchange tensors: on one host's CPUs through memory that they share, on GPUs as
`symmetric` decides, else by torch.distributed."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from penstock_server.kernels.native_build import NativeBuild

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = Path("/proc/self/ns/pid")
_NOWHERE = 0  # the place of a rank that cannot share memory


class Collectives(Protocol):
    """Every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values on all ranks, in place."""
        ...

    def gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """[rows, widths[rank]] of every rank → [rows, sum(widths)] on rank 0, None on the others."""
        ...

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """[rows, widths[rank]] of every rank → [rows, sum(widths)] on all of them."""
        ...

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        ...


class Distributed:
    """The default group of torch.distributed. Implements `Collectives`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        padded = _widened(x, max(widths))
        parts = [torch.empty_like(padded) for _ in widths] if dist.get_rank() == 0 else None
        dist.gather(padded, parts, dst=0)
        return None if parts is None else _joined(parts, widths)

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        padded = _widened(x, max(widths))
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded)
        return _joined(parts, widths)

    def minimum(self, value: int) -> int:
        # NCCL takes tensors of its own device only.
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        x = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return int(x.item())


def _widened(x: Tensor, width: int) -> Tensor:
    """Padded to `width`, because collectives need equal shapes."""
    return x.contiguous() if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))


def _joined(parts: list[Tensor], widths: tuple[int, ...]) -> Tensor:
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


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

    def gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        if self._rank == 0:
            return self.all_gather_columns(x, widths)
        self._gather(x, widths)
        return None

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        joined = x.new_empty((x.shape[0], sum(widths)))
        self._gather(x, widths, joined)
        return joined

    def minimum(self, value: int) -> int:
        return int(self._of_all(torch.tensor([value])).min())

    def _of_all(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]"""
        return self.all_gather_columns(x.view(1, -1), (x.numel(),) * self._size).view(self._size, *x.shape)


def connect(rank: int, size: int, native: NativeBuild | None) -> Collectives:
    """The collectives of this rank in the group of torch.distributed that the ranks have formed. All ranks get the
    same."""
    if dist.get_backend() != "gloo":
        from penstock_server.symmetric import connect_gpus

        return connect_gpus(rank, size)
    shared, reason = _share_memory(rank, size, native)
    if shared is None:
        logger.warning("the ranks exchange tensors over TCP, which is slow: %s", reason)
        return Distributed()
    logger.info("the ranks exchange tensors through shared memory")
    return shared


def _share_memory(rank: int, size: int, native: NativeBuild | None) -> tuple[SharedMemory | None, str]:
    """The memory, or why there is none."""
    if native is None:
        _gather_numbers(_NOWHERE, 0, 0)
        return None, "penstock_kernels has no kernels for this data type"
    Collective = native.module.Collective  # noqa: N806
    # The file has no name and ends with its processes. It does not count against the size of /dev/shm.
    memory = os.memfd_create("penstock ranks")
    with os.fdopen(memory, "rb+"):
        os.ftruncate(memory, Collective.memory_bytes(size))
        places, pids, files = _gather_numbers(_place(), os.getpid(), memory)
        if len(set(places)) > 1 or _NOWHERE in places:
            return None, "they are not all on one host and in one process namespace"
        collective, reason = None, "another rank cannot map the memory"
        try:
            with open(f"/proc/{pids[0]}/fd/{files[0]}", "rb+", buffering=0) as opened:
                collective = Collective(rank, pids, opened.fileno())
        except OSError as error:
            reason = f"rank {rank} cannot map the memory of rank 0: {error}"
        # Rank 0 closes its file after all have opened it.
        if Distributed().minimum(collective is not None) and collective is not None:
            return SharedMemory(collective, rank, size), ""
        return None, reason


def _place() -> int:
    """A number of this host and process namespace, in which a pid means the same process to all ranks."""
    try:
        text = _BOOT_ID.read_text() + os.readlink(_PROCESS_IDS)
    except OSError:
        return _NOWHERE
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _gather_numbers(*numbers: int) -> list[list[int]]:
    """For each number, its values by rank."""
    mine = torch.tensor(numbers)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    return torch.stack(of_ranks, dim=1).tolist()
