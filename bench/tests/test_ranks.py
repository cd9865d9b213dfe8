"""Ratios are those of one repeat."""

from figure import BENCHMARKS


def test_two_ranks_are_compared_with_one_rank_of_the_same_repeat() -> None:
    repeats = [{"bf16": {"1": {"1": 100.0, "2": 90.0}}}, {"bf16": {"1": {"1": 50.0, "2": 60.0}}}]
    figures = {figure.name: figure for figure in BENCHMARKS["ranks"]({"repeats": repeats})}
    assert figures["bf16, 1 streams: 2 rank(s)"].values == [90.0, 60.0]
    ratio = figures["bf16, 1 streams: two ranks to one"]
    assert (ratio.values, ratio.target) == ([0.9, 1.2], "≥ 0.9")
