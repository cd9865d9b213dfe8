"""The ranks that hold one model, and how a dimension is split among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from penstock_server.collectives import computes_alike, connect, is_same_processor, meet
from penstock_server.collectives.distributed import Distributed
from penstock_server.collectives.interface import Collectives
from penstock_server.config import Node
from penstock_server.errors import ConfigError
from penstock_server.kernels.native_build import NativeBuild


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's rank. With one rank, every method returns its argument."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=Distributed)
    computes_alike: bool = True  # whether all ranks compute the same bits from the same tensors
    local_size: int | None = None  # ranks on this machine; None: all

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        rendezvous: str,
        backend: str,
        native: NativeBuild | None,
        node: Node | None = None,
    ) -> RankGroup:
        """Connect to the other ranks by a torch.distributed init method, or with a node by TLS; blocks until all are
        connected. native: the kernels through which ranks share memory, if there are any."""
        if size == 1:
            return cls()
        if node is not None:
            network = meet(rank, size, rendezvous, node)
            return cls(rank, size, network, is_same_processor(network, native), node.local_size)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        collectives = connect(rank, size, native)
        return cls(rank, size, collectives, computes_alike(collectives))

    def leave(self) -> None:
        """Disconnect from the other ranks and end the threads of torch.distributed. The group must not be used
        afterwards.

        Before the interpreter ends: a thread that still holds a tensor of the last exchange then aborts the process
        ("terminate called without an active exception"). Workers end by os._exit instead, which waits for no rank."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def num_local(self) -> int:
        """How many ranks share the memory of this machine."""
        return self.size if self.local_size is None else self.local_size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return x if self.size == 1 else self.collectives.all_reduce(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values on all ranks, in place."""
        return x if self.size == 1 else self.collectives.broadcast(x)

    def agree(self, x: Tensor) -> Tensor:
        """What all ranks computed from the same tensors: rank 0's values, in place, where ranks compute other bits."""
        return x if self.computes_alike else self.broadcast(x)

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """[rows, widths[rank]] of every rank → [rows, sum(widths)] on all of them."""
        return x if self.size == 1 else self.collectives.all_gather_columns(x, widths)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return value if self.size == 1 else self.collectives.minimum(value)


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension split over the ranks, in order."""

    rank: int
    parts: tuple[range, ...]

    @property
    def mine(self) -> range:
        return self.parts[self.rank]

    def widths(self, unit: int = 1) -> tuple[int, ...]:
        """The size of each rank's part, times a unit."""
        return tuple(len(part) * unit for part in self.parts)


def split_evenly(total: int, rank: int, size: int, unit: int = 1) -> range:
    """This rank's part of a dimension: contiguous, in whole units; the first ranks get one more if they do not divide.

    The last unit may be partial. Ranks after the last unit get an empty part.
    """
    num_units = -(-total // unit)
    base, extra = divmod(num_units, size)
    start = rank * base + min(rank, extra)
    stop = start + base + (1 if rank < extra else 0)
    return range(min(start * unit, total), min(stop * unit, total))


def split_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """This rank's query heads and the KV heads they read.

    Whole groups (a KV head with its query heads) are distributed. With fewer groups than ranks, several ranks split a
    group's query heads, and each holds a copy of its KV head. Raises ConfigError when there are fewer query heads than
    ranks.
    """
    heads_per_group = num_heads // num_kv_heads
    if size > num_heads:
        raise ConfigError(
            f"a model with {num_heads} attention heads in {num_kv_heads} groups cannot be split over {size} ranks; "
            f"at most {num_heads} are possible"
        )
    if size <= num_kv_heads:
        kv_heads = split_evenly(num_kv_heads, rank, size)
        return range(kv_heads.start * heads_per_group, kv_heads.stop * heads_per_group), kv_heads
    rank_groups = [split_evenly(size, group, num_kv_heads) for group in range(num_kv_heads)]
    group = next(group for group, ranks in enumerate(rank_groups) if rank in ranks)
    heads = split_evenly(heads_per_group, rank - rank_groups[group].start, len(rank_groups[group]))
    start = group * heads_per_group
    return range(start + heads.start, start + heads.stop), range(group, group + 1)
