"""What each rank holds of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.layers.experts.spec import MoeSpec
from penstock_server.layers.shard import Shard
from penstock_server.parallel import Split, split_evenly


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Experts are dealt out whole. With fewer experts than ranks every rank has a part of each: of its intermediate
    dimension. The router is on every rank, and the shared expert is split like any MLP.

    Whole experts give the very numbers of one rank. Where `Shard.exact`, those of all ranks are gathered before they
    are weighted and added up; otherwise every rank adds up its own first.
    """

    shard: Shard
    experts: Split  # with parts of each: all of them on every rank
    intermediate: Split | None  # of each expert; None: experts are whole

    @classmethod
    def of(cls, spec: MoeSpec, shard: Shard) -> ExpertShard:
        """Raises ConfigError when there are too many ranks."""
        num_experts, rank, size = spec.routing.num_experts, shard.group.rank, shard.group.size
        if num_experts >= size:
            parts = tuple(split_evenly(num_experts, other, size) for other in range(size))
            return cls(shard, Split(rank, parts), None)
        intermediate = shard.split(spec.intermediate_size, "intermediate size of experts")
        return cls(shard, Split(rank, (range(num_experts),) * size), intermediate)
