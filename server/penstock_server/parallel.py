"""The ranks that hold one model: how a dimension is split among the ranks of a stage, and how rows pass from stage to
stage. With one stage, a stage's ranks are all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from penstock_server.collectives import Ranks, computes_alike
from penstock_server.collectives.distributed import Distributed
from penstock_server.collectives.interface import Collectives
from penstock_server.device.native.build import NativeBuild
from penstock_server.errors import ConfigError
from penstock_server.protocol.config import Node


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's place in a pipeline of stages, each of which holds some consecutive layers. With one stage, it holds
    all layers."""

    index: int = 0
    size: int = 1
    # A pair of ranks each: this one and the rank with the same number in the stage before, and in the next one.
    before: Collectives | None = None
    behind: Collectives | None = None
    everyone: Collectives = field(default_factory=Distributed)  # all ranks of all stages

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.size

    def receive(self, rows: Tensor) -> Tensor:
        """Fills `rows` with what the stage before sends; waits for it."""
        assert self.before is not None, "the first stage receives nothing"
        return self.before.broadcast(rows)

    def send(self, rows: Tensor) -> None:
        """Sends rows to the next stage. It may wait until that one receives them."""
        assert self.behind is not None, "the last stage sends nothing"
        self.behind.broadcast(rows)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's rank in its stage. With one rank, every method returns its argument."""

    rank: int = 0
    size: int = 1  # ranks of the stage
    collectives: Collectives = field(default_factory=Distributed)
    computes_alike: bool = True  # whether all ranks compute the same bits from the same tensors
    stage: Stage = field(default_factory=Stage)
    local_size: int | None = None  # ranks that share this machine's memory; None: all

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        rendezvous: str,
        backend: str,
        native: NativeBuild | None,
        num_stages: int = 1,
        node: Node | None = None,
    ) -> RankGroup:
        """Connect to the other ranks, as `Ranks.connect`; blocks until all are connected. rank, size: over all stages;
        the first ranks are the last stage, because rank 0 returns the tokens. Raises ConfigError if the stages cannot
        have equally many ranks."""
        if size % num_stages:
            raise ConfigError(f"{size} ranks cannot form {num_stages} pipeline stages with the same number of ranks")
        if size == 1:
            return cls()
        ranks = Ranks.connect(rank, size, rendezvous, backend, native, node)
        width = size // num_stages
        stages = [tuple(range(first, first + width)) for first in range(0, size, width)]
        # The ranks of a link are not in ascending order: the first one sends.
        links = [link for behind, before in itertools.pairwise(stages) for link in zip(before, behind, strict=True)]
        # All ranks form all groups, in one order.
        found = {numbers: ranks.group(numbers) for numbers in [*stages, *links] if len(numbers) > 1}
        stage = Stage(
            num_stages - 1 - rank // width,
            num_stages,
            found.get((rank + width, rank)),
            found.get((rank, rank - width)),
            ranks.everyone,
        )
        collectives = found.get(stages[rank // width])
        if collectives is None:
            return cls(stage=stage, local_size=ranks.local_size)
        is_alike = computes_alike(collectives, native)
        return cls(rank % width, width, collectives, is_alike, stage, ranks.local_size)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.size * self.stage.size

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
        return self.num_ranks if self.local_size is None else self.local_size

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

    def minimum_of_all(self, value: int) -> int:
        """The smallest of the values of all ranks of all stages."""
        return self.minimum(value) if self.stage.size == 1 else self.stage.everyone.minimum(value)


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


def split_layers(costs: Sequence[int], head_cost: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage: consecutive, at least one, and so that the largest sum of costs is the smallest
    possible. The last stage has the head, too. Raises ConfigError when there are fewer layers than stages."""
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ConfigError(
            f"a model with {num_layers} layers cannot be split into {num_stages} pipeline stages; at most {num_layers} "
            "are possible"
        )
    before = [0, *itertools.accumulate(costs)]

    @functools.cache
    def best(start: int, num_left: int) -> tuple[int, tuple[int, ...]]:
        """The largest cost of the stages from layer `start` on, and where each ends."""
        if num_left == 1:
            return before[-1] - before[start] + head_cost, (num_layers,)
        choices = []
        for stop in range(start + 1, num_layers - num_left + 2):
            largest, stops = best(stop, num_left - 1)
            choices.append((max(before[stop] - before[start], largest), (stop, *stops)))
        return min(choices)

    stops = best(0, num_stages)[1]
    return tuple(range(start, stop) for start, stop in zip((0, *stops), stops, strict=False))


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
