"""How the ranks of one model exchange tensors. Chosen when they connect: on one host's CPUs, memory that they share; on
GPUs that read each other's memory, sums in it; on the CPUs of several hosts, TLS connections; else
torch.distributed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from penstock_server.collectives import shared_memory, symmetric
from penstock_server.collectives.distributed import Distributed, number_of
from penstock_server.collectives.interface import Collectives
from penstock_server.collectives.network import meet, open_store

if TYPE_CHECKING:
    from penstock_server.kernels.native_build import NativeBuild

logger = logging.getLogger(__name__)

__all__ = ["computes_alike", "connect", "count_on_host", "is_same_processor", "meet", "open_store"]

_CPU_INFO = Path("/proc/cpuinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_NO_NUMBER = (1 << 63) - 1


def connect(rank: int, size: int, native: NativeBuild | None, group: dist.ProcessGroup | None = None) -> Collectives:
    """The collectives of this rank in the group of torch.distributed that the ranks have formed; with NCCL, each has
    set its device. All ranks get the same kind. native: as of `RankGroup.join`. group: some of the ranks, of which this
    one is number `rank`; None: all of them."""
    if dist.get_backend() == "nccl":
        return _connect_gpus(rank, size) if group is None else Distributed(group)
    memory, reason = shared_memory.share(rank, size, native, group)
    if memory is None:
        logger.warning("the ranks exchange tensors over TCP, which is slow: %s", reason)
        return Distributed(group)
    logger.info("the ranks exchange tensors through shared memory")
    return memory


def _connect_gpus(rank: int, size: int) -> Collectives:
    nccl = Distributed()
    # Before the rendezvous, in which a rank would wait for one that does not take part.
    reason = symmetric.unavailable_reason(size)
    if not nccl.minimum(reason is None):
        logger.info("the ranks exchange tensors by NCCL: %s", reason or "another rank cannot share its memory")
        return nccl
    memory, failure = symmetric.share(rank, size)
    if not nccl.minimum(memory is not None) or memory is None:
        logger.warning("the ranks exchange tensors by NCCL: %s", failure or "sharing memory failed on another rank")
        return nccl
    limit = symmetric.MAX_BYTES >> 10
    logger.info("the ranks add tensors of up to %d KiB in each other's memory, all others by NCCL", limit)
    return memory


def computes_alike(collectives: Collectives) -> bool:
    """Whether all ranks compute on processors of one kind, so that the same kernels give the same bits. Ranks without
    a GPU are on one host."""
    if dist.get_backend() != "nccl":
        return True
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return _agree_on(collectives, f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}", "GPUs")


def is_same_processor(collectives: Collectives, native: NativeBuild | None) -> bool:
    """The same for ranks on the CPUs of several hosts. torch chooses its kernels by the CPU, as `native` is chosen."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    models = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return _agree_on(collectives, f"{native} {sorted(models)}", "CPUs")


def count_on_host(collectives: Collectives, rank: int, size: int) -> int:
    """How many of the ranks take their memory from where this one does: this machine, or a control group on it that has
    a limit of its own."""
    mine = number_of(_memory_place(rank))
    # Each rank in turn gives its number, which is below that of the others.
    numbers = [collectives.minimum(mine if rank == giving else _NO_NUMBER) for giving in range(size)]
    return numbers.count(mine)


def _memory_place(rank: int) -> str:
    try:
        machine = _BOOT_ID.read_text()
    except OSError:
        return f"rank {rank}"  # unknown, so it counts as a machine of its own
    try:
        is_limited = (_CONTROL_GROUP / "memory.max").read_text().strip() != "max"
        return f"{machine} {_CONTROL_GROUP.stat().st_ino}" if is_limited else machine
    except OSError:
        return machine


def _agree_on(collectives: Collectives, kind: str, processors: str) -> bool:
    number = number_of(kind)
    is_same = collectives.minimum(number) == -collectives.minimum(-number)
    if not is_same:
        logger.warning("the ranks have %s of several kinds, so rank 0 tells the others each step's tokens", processors)
    return is_same
