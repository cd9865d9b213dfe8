"""Each rank's part of a model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.errors import ConfigError
from penstock_server.parallel import RankGroup, Split, split_evenly, split_heads


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The attention heads of one layer on each rank."""

    heads: Split  # query heads
    kv_heads: tuple[range, ...]  # by rank; with fewer KV heads than ranks, several ranks hold the same one

    @property
    def mine(self) -> range:
        return self.heads.mine

    @property
    def my_kv(self) -> range:
        return self.kv_heads[self.heads.rank]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model. Norms are replicated, and so are KV heads if there are fewer of them than ranks.

    exact: `RowParallelLinear`s are split by outputs, over inputs gathered from all ranks, so each element is computed
    in one piece and equals that of a single rank to the bit. Otherwise they are split by inputs and the ranks' results
    are summed: half the messages, but each rank rounds its summand.
    """

    group: RankGroup
    exact: bool
    hidden: Split
    vocab: Split

    @classmethod
    def of(cls, hidden_size: int, vocab_size: int, group: RankGroup, exact: bool = True) -> Shard:
        """Raises ConfigError if a dimension is smaller than the number of ranks."""
        hidden = _split(hidden_size, group, "hidden size")
        return cls(group, exact, hidden, _split(vocab_size, group, "vocabulary"))

    @property
    def hidden_size(self) -> int:
        """Over all ranks."""
        return self.hidden.parts[-1].stop

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadSplit:
        """Raises ConfigError if there are fewer heads than ranks."""
        parts = [split_heads(num_heads, num_kv_heads, rank, self.group.size) for rank in range(self.group.size)]
        heads, kv_heads = zip(*parts, strict=True)
        return HeadSplit(Split(self.group.rank, heads), kv_heads)

    def split(self, total: int, what: str) -> Split:
        """An inner dimension of a layer; `what` names it. Raises ConfigError if it is smaller than the number of
        ranks."""
        return _split(total, self.group, what)


def _split(total: int, group: RankGroup, what: str) -> Split:
    if total < group.size:
        raise ConfigError(f"a model with {what} {total} cannot be split over {group.size} ranks")
    # PERF: matrix kernels work in tiles of 32 columns; parts of whole tiles waste none.
    unit = next(unit for unit in (32, 16, 8, 4, 2, 1) if -(-total // unit) >= group.size)
    return Split(group.rank, tuple(split_evenly(total, rank, group.size, unit) for rank in range(group.size)))
