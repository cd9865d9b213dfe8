"""The fair share of processor time, and neighbours that end."""

from pathlib import Path

from contention import busy_neighbours
from figure import BENCHMARKS, fair_share


def test_busy_threads_share_the_cores_equally() -> None:
    assert [fair_share(2, num) for num in (0, 1, 2)] == [1.0, 2 / 3, 0.5]
    assert fair_share(8, 2) == 0.8


def test_throughput_is_relative_to_its_fair_share_of_the_same_repeat() -> None:
    def repeat(*rates: float) -> dict[str, object]:
        return {"bf16": {"8": {str(num): {"tokens_per_s": rate} for num, rate in enumerate(rates)}}}

    record = {"machine": {"num_cores": 2}, "repeats": [repeat(90.0, 60.0, 22.5), repeat(60.0, 20.0, 30.0)]}
    assert not list(BENCHMARKS["contention"](record)), "the prefix cache had the prompts of all cells but the first"
    one, two = BENCHMARKS["contention"]({**record, "prompts": "of each cell"})
    assert (one.name, one.values) == ("bf16, 8 streams, 1 busy neighbours: throughput to the fair share", [1.0, 0.5])
    assert two.values == [0.5, 1.0]


def test_neighbours_end_with_the_context() -> None:
    with busy_neighbours(2) as pids:
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
