"""Each rank's part of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.layers.experts.spec import MoeSpec
from penstock_server.layers.shard import Shard
from penstock_server.parallel import Split, split_evenly


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Each rank holds whole experts (expert parallel). With fewer experts than ranks, each rank holds a part of every
    expert: of its intermediate dimension (tensor parallel). The router is replicated, and the shared expert is split
    like any MLP.

    Whole experts compute the results of a single rank to the bit. If `Shard.exact`, the results of all ranks are
    gathered before the weighted sum; otherwise each rank sums its own first.
    """

    shard: Shard
    experts: Split  # all of them on every rank, if the ranks hold parts
    intermediate: Split | None  # split of each expert; None: experts are whole

    @property
    def sums_results(self) -> bool:
        """Whether the ranks' results are added up before the weighted sum."""
        return self.intermediate is None and self.shard.exact and self.shard.group.size > 1

    @classmethod
    def of(cls, spec: MoeSpec, shard: Shard) -> ExpertShard:
        """Raises ConfigError if there are too many ranks."""
        num_experts, rank, size = spec.routing.num_experts, shard.group.rank, shard.group.size
        if num_experts >= size:
            parts = tuple(split_evenly(num_experts, other, size) for other in range(size))
            return cls(shard, Split(rank, parts), None)
        intermediate = shard.split(spec.intermediate_size, "intermediate size of experts")
        return cls(shard, Split(rank, (range(num_experts),) * size), intermediate)
