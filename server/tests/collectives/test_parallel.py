"""Dimensions split among ranks: every index on one rank, in whole groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_server import collectives
from penstock_server.collectives import count_on_host
from penstock_server.errors import ConfigError
from penstock_server.parallel import split_evenly, split_heads
from rank_threads import run_ranks


@given(total=st.integers(0, 5000), size=st.integers(1, 9), unit=st.integers(1, 64))
def test_parts_are_contiguous(total: int, size: int, unit: int) -> None:
    parts = [split_evenly(total, rank, size, unit) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(total))
    lengths = [-(-len(part) // unit) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert all(part.start % unit == 0 or part.start == total for part in parts)


@given(kv_heads=st.integers(1, 12), per_group=st.integers(1, 8), size=st.integers(1, 16))
def test_every_head_is_on_one_rank_with_its_kv_head(kv_heads: int, per_group: int, size: int) -> None:
    heads = kv_heads * per_group
    if size > heads:
        for rank in range(size):
            with pytest.raises(ConfigError):
                split_heads(heads, kv_heads, rank, size)
        return
    splits = [split_heads(heads, kv_heads, rank, size) for rank in range(size)]
    assert [head for mine, _ in splits for head in mine] == list(range(heads))
    for mine, kv in splits:
        assert len(mine) >= 1
        assert len(mine) % len(kv) == 0
        # Head i of this rank reads KV head i // (heads per KV head) of this rank, as attention assumes.
        assert [head // per_group for head in mine] == [kv[i // (len(mine) // len(kv))] for i in range(len(mine))]


def test_ranks_on_one_host_are_counted_also_if_they_do_not_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts() -> list[int]:
        return run_ranks(3, lambda group: count_on_host(group, group.rank, group.size))  # type: ignore[arg-type]

    assert counts() == [3, 3, 3]
    monkeypatch.setattr(collectives, "_memory_place", lambda rank: "one" if rank < 2 else "other")
    assert counts() == [2, 2, 1]


def test_nine_heads_in_three_groups_over_two_ranks_are_six_and_three() -> None:
    assert split_heads(9, 3, 0, 2) == (range(6), range(2))
    assert split_heads(9, 3, 1, 2) == (range(6, 9), range(2, 3))


def test_kv_heads_are_copied_when_there_are_fewer_than_ranks() -> None:
    assert [split_heads(8, 2, rank, 4) for rank in range(4)] == [
        (range(2), range(1)),
        (range(2, 4), range(1)),
        (range(4, 6), range(1, 2)),
        (range(6, 8), range(1, 2)),
    ]


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="9 attention heads in 3 groups cannot be split over 10 ranks; at most 9"):
        split_heads(9, 3, 0, 10)
