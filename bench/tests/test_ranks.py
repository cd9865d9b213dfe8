"""Ratios are those of one repeat."""

from figure import BENCHMARKS


def test_two_ranks_are_compared_with_one_rank_of_the_same_repeat() -> None:
    repeats = [{"bf16": {"1": {"1": 100.0, "2": 90.0}}}, {"bf16": {"1": {"1": 50.0, "2": 60.0}}}]
    figures = {figure.name: figure for figure in BENCHMARKS["ranks"]({"repeats": repeats})}
    assert figures["bf16, 1 streams: 2 rank(s)"].values == [90.0, 60.0]
    ratio = figures["bf16, 1 streams: two ranks to one"]
    assert (ratio.values, ratio.target) == ([0.9, 1.2], "≥ 0.9")
    assert not any("gather" in name for name in figures)


def test_gathers_are_told_in_microseconds() -> None:
    record = {"repeats": [{}], "gathers": [{"1": 5e-6, "8": 8e-6}, {"1": 6e-6, "8": 7e-6}]}
    found = {figure.name: [round(value, 6) for value in figure.values] for figure in BENCHMARKS["ranks"](record)}
    assert found == {"one gather of 1 row(s)": [5.0, 6.0], "one gather of 8 row(s)": [8.0, 7.0]}
