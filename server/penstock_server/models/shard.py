"""What each rank holds of a model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.errors import ConfigError
from penstock_server.models.spec import ModelSpec
from penstock_server.parallel import RankGroup, Split, split_evenly, split_heads


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share. Norms, and KV heads where there are fewer of them than ranks, are on several ranks.

    exact: the projections out of attention and MLP are split by their results, over inputs gathered from all ranks, so
    that every number is computed in one piece and is the one that a single rank computes. Otherwise they are split by
    their inputs and the ranks' results summed: half the messages, but a rounding for each rank.
    """

    exact: bool
    hidden: Split
    heads: Split
    kv_heads: range  # on this rank
    intermediate: Split
    vocab: Split

    @classmethod
    def of(cls, spec: ModelSpec, group: RankGroup, exact: bool = True) -> Shard:
        """Raises ConfigError when the model cannot be split over so many ranks."""
        heads = [split_heads(spec.num_heads, spec.num_kv_heads, rank, group.size) for rank in range(group.size)]
        return cls(
            exact=exact,
            hidden=_split(spec.hidden_size, group, "hidden size"),
            heads=Split(group.rank, tuple(query_heads for query_heads, _ in heads)),
            kv_heads=heads[group.rank][1],
            intermediate=_split(spec.intermediate_size, group, "intermediate size"),
            vocab=_split(spec.vocab_size, group, "vocabulary"),
        )


def _split(total: int, group: RankGroup, what: str) -> Split:
    if total < group.size:
        raise ConfigError(f"a model with {what} {total} cannot be split over {group.size} ranks")
    # PERF: matrix kernels work in tiles of 32 columns; parts that are whole tiles waste none.
    unit = next(unit for unit in (32, 16, 8, 4, 2, 1) if -(-total // unit) >= group.size)
    return Split(group.rank, tuple(split_evenly(total, rank, group.size, unit) for rank in range(group.size)))
