"""The group of ranks that hold one model: what they say to each other, and how a dimension is split among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's place among the ranks. With one rank every method is free."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: str, backend: str) -> RankGroup:
        """Meet the other ranks at a torch.distributed init method; blocks until all are there."""
        if size > 1:
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        return cls(rank, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values to everybody, in place."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        import torch

        x = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return int(x.item())
