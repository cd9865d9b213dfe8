"""What each rank holds of a model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.errors import ConfigError
from penstock_server.parallel import RankGroup, Split, split_evenly, split_heads


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one layer's attention."""

    heads: Split  # query heads
    kv_heads: tuple[range, ...]  # of each rank; several ranks hold the same where there are fewer than ranks

    @property
    def mine(self) -> range:
        return self.heads.mine

    @property
    def my_kv(self) -> range:
        return self.kv_heads[self.heads.rank]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share. Norms, and KV heads where there are fewer of them than ranks, are on several ranks.

    exact: the projections out of attention and MLP are split by their results, over inputs gathered from all ranks, so
    that every number is computed in one piece and is the one that a single rank computes. Otherwise they are split by
    their inputs and the ranks' results summed: half the messages, but a rounding for each rank.
    """

    group: RankGroup
    exact: bool
    hidden: Split
    vocab: Split

    @classmethod
    def of(cls, hidden_size: int, vocab_size: int, group: RankGroup, exact: bool = True) -> Shard:
        """Raises ConfigError when the model cannot be split over so many ranks."""
        hidden = _split(hidden_size, group, "hidden size")
        return cls(group, exact, hidden, _split(vocab_size, group, "vocabulary"))

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """Raises ConfigError when there are fewer heads than ranks."""
        parts = [split_heads(num_heads, num_kv_heads, rank, self.group.size) for rank in range(self.group.size)]
        heads, kv_heads = zip(*parts, strict=True)
        return HeadShare(Split(self.group.rank, heads), kv_heads)

    def split(self, total: int, what: str) -> Split:
        """A layer's inner dimension. Raises ConfigError when it is smaller than the number of ranks."""
        return _split(total, self.group, what)


def _split(total: int, group: RankGroup, what: str) -> Split:
    if total < group.size:
        raise ConfigError(f"a model with {what} {total} cannot be split over {group.size} ranks")
    # PERF: matrix kernels work in tiles of 32 columns; parts that are whole tiles waste none.
    unit = next(unit for unit in (32, 16, 8, 4, 2, 1) if -(-total // unit) >= group.size)
    return Split(group.rank, tuple(split_evenly(total, rank, group.size, unit) for rank in range(group.size)))
