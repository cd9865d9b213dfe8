"""How the ranks of one model exchange tensors. Chosen when they connect: on one machine's CPUs, memory that they share;
on GPUs that read each other's memory, sums in it; on the CPUs of several machines, TLS connections; else
torch.distributed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from penstock_server.collectives import shared_memory, symmetric
from penstock_server.collectives.distributed import Distributed, number_of
from penstock_server.collectives.interface import Collectives
from penstock_server.collectives.network import Network, meet, open_store

if TYPE_CHECKING:
    from penstock_server.device.native.build import NativeBuild
    from penstock_server.protocol.config import Node

logger = logging.getLogger(__name__)

__all__ = ["Ranks", "computes_alike", "connect_gpus", "count_on_host", "meet", "open_store"]

_CPU_INFO = Path("/proc/cpuinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_NO_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of a model, connected. Some of them form groups."""

    rank: int  # rank of this process
    size: int
    everyone: Network | Distributed
    native: NativeBuild | None
    node: Node | None  # None: all ranks are on this machine
    local_size: int | None  # ranks that share this machine's memory; None: all

    @classmethod
    def connect(
        cls, rank: int, size: int, rendezvous: str, backend: str, native: NativeBuild | None, node: Node | None
    ) -> Ranks:
        """Connect by a torch.distributed init method, or with a node by TLS and, on GPUs, then by NCCL, for which each
        rank has set its device. native: the kernels through which ranks share memory, if there are any. Raises
        ConfigError."""
        if node is None:
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
            return cls(rank, size, Distributed(), native, None, None)
        network = meet(rank, size, rendezvous, node)
        # Ray may place ranks on one machine that do not know of each other.
        local_size = max(node.local_size, count_on_host(network, rank, size))
        if not node.uses_gpu:
            return cls(rank, size, network, native, node, local_size)
        store = open_store(network, rank, size, rendezvous, node)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        return cls(rank, size, Distributed(), native, node, local_size)

    def group(self, ranks: tuple[int, ...]) -> Collectives | None:
        """The collectives of some ranks, which are numbered in this order; None: this rank is not among them. Every
        rank must take part, and form the same groups in the same order. All ranks of a group get the same kind."""
        is_all = ranks == tuple(range(self.size))
        group = None
        if isinstance(self.everyone, Distributed) and not is_all:
            group = dist.new_group(ranks, sort_ranks=False)
        if self.rank not in ranks:
            return None
        assert not isinstance(group, int), "only a rank outside of the group gets a number"
        among = self.everyone.part(ranks) if isinstance(self.everyone, Network) else Distributed(group)
        if not self._share_machine(ranks):
            return among
        if _uses_nccl():
            return connect_gpus(self.rank, self.size) if is_all else among
        memory, reason = shared_memory.share(ranks.index(self.rank), len(ranks), self.native, among)
        if memory is None:
            logger.warning("the ranks exchange tensors over TCP, which is slow: %s", reason)
            return among
        logger.info("the ranks exchange tensors through shared memory")
        return memory

    def _share_machine(self, ranks: tuple[int, ...]) -> bool:
        """Whether they are on one node: each has equally many, in the order of the ranks."""
        return self.node is None or len({rank // self.node.local_size for rank in ranks}) == 1


def connect_gpus(rank: int, size: int) -> Collectives:
    """The collectives of all ranks on the GPUs of one machine."""
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


def computes_alike(collectives: Collectives, native: NativeBuild | None) -> bool:
    """Whether all ranks compute on processors of one kind, so that the same kernels give the same bits. On CPUs, torch
    chooses its kernels by the CPU, as `native` is chosen."""
    if _uses_nccl():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        return _agree_on(collectives, f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}", "GPUs")
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    models = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return _agree_on(collectives, f"{native} {sorted(models)}", "CPUs")


def _uses_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


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
