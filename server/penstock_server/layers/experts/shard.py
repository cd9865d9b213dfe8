"""What each rank holds of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.layers.experts.spec import MoeSpec
from penstock_server.layers.linear import Layout
from penstock_server.parallel import RankGroup, Split, split_evenly, split_tiles


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Experts are dealt out whole. With fewer experts than ranks every rank has a part of each: of its intermediate
    dimension. The router is on every rank, and the shared expert is split like any MLP.

    exact: as `Shard.exact`. Whole experts give the very numbers of one rank, and those of all ranks are gathered before
    they are weighted and added up; otherwise every rank adds up its own first.
    """

    group: RankGroup
    exact: bool
    hidden: Split
    experts: Split | None  # None: every rank has a part of each
    intermediate: Split | None  # of each expert; None: experts are whole
    shared: Split | None  # None: there is no shared expert

    @classmethod
    def of(cls, spec: MoeSpec, hidden: Split, group: RankGroup, exact: bool) -> ExpertShard:
        """hidden: how results of projections are dealt out. Raises ConfigError when there are too many ranks."""
        num_experts, ranks = spec.routing.num_experts, range(group.size)
        are_whole = num_experts >= group.size
        width = spec.shared_intermediate_size
        return cls(
            group=group,
            exact=exact,
            hidden=hidden,
            experts=Split(group.rank, tuple(split_evenly(num_experts, rank, group.size) for rank in ranks))
            if are_whole
            else None,
            intermediate=None
            if are_whole
            else split_tiles(spec.intermediate_size, group, "intermediate size of experts"),
            shared=split_tiles(width, group, "intermediate size of the shared expert") if width else None,
        )

    def my_experts(self, spec: MoeSpec) -> range:
        return range(spec.routing.num_experts) if self.experts is None else self.experts.mine

    @property
    def shared_layout(self) -> Layout:
        assert self.shared is not None
        return Layout(self.group, self.exact, self.shared.widths(), self.hidden.widths())
