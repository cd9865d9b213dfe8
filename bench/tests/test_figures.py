"""Rules for raw results that a page may quote, and for what a page must say to be current."""

from pathlib import Path
from typing import Any

import figure
import figures
import pytest
import table
from figure import BENCHMARKS, Figure
from result import SUFFIX, beside, save

MACHINE = {"cpu": "test", "num_cores": 2}
REVISION = "0123456789ab"


@pytest.fixture(autouse=True)
def history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of one commit."""
    monkeypatch.setattr(figures, "in_history", lambda revision: revision == REVISION)
    monkeypatch.setattr(figures, "is_old", lambda revision, benchmark: False)


def keep(runs: Path, name: str, **changes: Any) -> Path:
    depths = {depth: {"idle_s": idle} for depth, idle in (("1", 2e-3), ("2", 1e-4))}
    record = {"command": "python bench/run_ahead.py", "started": "2026-01-01T00:00:00", "revision": REVISION}
    record |= {"machine": MACHINE, "loads": {"8": [depths, depths, depths]}} | changes
    path = runs / name
    save(record, path)
    return path


def test_the_newest_result_that_may_be_quoted_is_quoted(tmp_path: Path) -> None:
    keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz")
    later = keep(tmp_path, "2026-01-02-amd-2c-run-ahead.json.gz", started="2026-01-02T00:00:00")
    dirty = keep(tmp_path, "2026-01-03-amd-2c-run-ahead.json.gz", started="2026-01-03", revision=f"{REVISION}-dirty")
    unknown = keep(tmp_path, "2026-01-04-amd-2c-run-ahead-2.json.gz", started="2026-01-04", revision="ffffffffffff")
    refused: dict[Path, str] = {}
    (quoted,) = figures.quotable("run-ahead", refused, tmp_path)
    assert quoted.path == later
    assert set(refused) == {dirty, unknown}


def test_fewer_than_three_repeats_are_not_quoted(tmp_path: Path) -> None:
    depths = {"1": {"idle_s": 1.0}}
    path = keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz", loads={"8": [depths, depths]})
    refused: dict[Path, str] = {}
    assert figures.quotable("run-ahead", refused, tmp_path) == []
    assert "2 repeats, at least 3" in refused[path]


def test_a_result_of_a_busy_machine_is_not_quoted(tmp_path: Path) -> None:
    path = keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz", busy_share=0.4)
    refused: dict[Path, str] = {}
    assert figures.quotable("run-ahead", refused, tmp_path) == []
    assert "40% of the processors" in refused[path]


def test_the_newest_result_of_each_kind_of_machine_is_quoted(tmp_path: Path) -> None:
    other = {"cpu": "other", "num_cores": 2}
    first = keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz", machine=other)
    keep(tmp_path, "2026-01-02-amd-2c-run-ahead.json.gz", started="2026-01-02")
    last = keep(tmp_path, "2026-01-03-amd-2c-run-ahead.json.gz", started="2026-01-03")
    assert [quoted.path for quoted in figures.quotable("run-ahead", {}, tmp_path)] == [last, first]


def test_a_raw_result_that_no_page_links_to_is_named(tmp_path: Path) -> None:
    linked = keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz")
    beside(linked, ".md").touch()
    left = keep(tmp_path, "2026-01-02-amd-2c-run-ahead.json.gz")
    assert figures.unquoted([f"[raw](../bench/runs/{linked.name})"], tmp_path) == [left.name]


def test_a_result_is_marked_as_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz")
    (quoted,) = figures.quotable("run-ahead", {}, tmp_path)
    assert "**old**" not in quoted.source()
    monkeypatch.setattr(figures, "is_old", lambda revision, benchmark: (revision, benchmark) == (REVISION, "run-ahead"))
    assert "**old**" in quoted.source()


@pytest.mark.parametrize(
    ("target", "value", "is_missed"),
    [
        ("≥ 0.9", 0.89, True),
        ("≥ 0.9", 0.9, False),
        ("≤ 3 s", 3.1, True),
        ("< 1 %", 1.0, True),
        ("≥ −1 %", -2.0, True),
        ("≥ 9,500", 9_600, False),
        ("0", 1, True),
        ("", 5, False),
    ],
)
def test_a_figure_knows_whether_it_misses_its_target(target: str, value: float, is_missed: bool) -> None:
    assert Figure("name", target, [value]).is_missed == is_missed


def test_a_limit_is_the_larger_of_those_before_and_after_the_run() -> None:
    limits = {"read_bytes_per_s": {"huge_pages": 45.0}, "product_flop_per_s": {"bf16": 3.0}}
    after = {"read_bytes_per_s": {"huge_pages": 52.0}, "product_flop_per_s": {"bf16": 2.0}}
    best = table.best_limits({"limits": limits, "limits_after": after})
    assert best == {"read_bytes_per_s": {"huge_pages": 52.0}, "product_flop_per_s": {"bf16": 3.0}}


def test_a_figure_shows_median_range_and_repeats() -> None:
    row = Figure("time", "≤ 2", [3.0, 1.0, 2.0, 10.0], " s", 1).row()
    assert row == ["time", "≤ 2", "2.5 s", "1.0 s to 10.0 s", "4"]


def test_a_page_is_current_until_a_figure_in_it_changes(tmp_path: Path) -> None:
    keep(tmp_path, "2026-01-01-amd-2c-run-ahead.json.gz")
    results = {"run-ahead": figures.quotable("run-ahead", {}, tmp_path), "latency": []}
    page = figures.rendered("# Page\n<!-- figures: all -->\nold\n<!-- end of figures -->\nend\n", results)
    assert "2,000 µs" in page
    assert "Not measured yet" in page
    assert "\nold\n" not in page
    assert page.startswith("# Page\n")
    assert page.endswith("\nend\n")
    assert figures.rendered(page, results) == page
    assert figures.rendered(page.replace("2,000 µs", "1,000 µs"), results) == page


def test_a_block_without_a_result_is_an_error() -> None:
    with pytest.raises(figures.FigureError, match="compare"):
        figures.rendered("<!-- figures: compare -->\n<!-- end of figures -->", {"compare": []})


def test_every_raw_result_of_the_tree_belongs_to_a_benchmark() -> None:
    for path in figures.RUNS.glob(f"*{SUFFIX}"):
        found = figures.FILE_NAME.fullmatch(path.name)
        assert found, path.name
        assert found["benchmark"] in {*BENCHMARKS, "kills", "predict"}, path.name


def test_kills_and_drains_of_replicas_are_quoted_without_the_other_faults() -> None:
    part = {"done": 500, "differences": [], "answers": 8000}
    parts = {"kills, 2 replicas": part, "drains": {**part, "handovers": 31}}
    rows = [figure.row() for figure in BENCHMARKS["chaos-replicas"]({"parts": parts})]
    assert [row[:3] for row in rows] == [
        ["kills, 2 replicas", "", "500"],
        ["kills, 2 replicas: answers that differ", "0", "0"],
        ["kills, 2 replicas: answers compared", "", "8,000"],
        ["drains", "", "500"],
        ["drains: answers that differ", "0", "0"],
        ["drains: answers compared", "", "8,000"],
        ["drains: streams that moved to another server", "", "31"],
    ]


def test_a_column_is_compared_with_the_peer_that_is_best_in_its_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"penstock": [30.0, 20.0], "one": [10.0, 20.0], "other": [20.0, 10.0]}
    repeats = [{name: {"loads": {"8 streams": values[repeat]}} for name, values in speeds.items()} for repeat in (0, 1)]
    monkeypatch.setattr(figure, "floors", lambda *_: {"8 streams": 40.0})
    monkeypatch.setattr(figure, "figures", lambda result: result["loads"])
    limits: dict[str, dict[str, float]] = {"read_bytes_per_s": {}, "product_flop_per_s": {}}
    record = {"limits": limits, "model": {}, "load": {}, "repeats": repeats}
    values = {row.name: (row.target, list(row.values)) for row in BENCHMARKS["compare"](record)}
    assert values["penstock: 8 streams, speed to the best peer"] == ("≥ 1.15", [1.5, 1.0])
    assert values["penstock: 8 streams, share of the machine's limit"] == ("≥ 0.9", [0.75, 0.5])
