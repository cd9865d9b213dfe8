"""The table's arithmetic: floors, medians and ratios."""

from typing import Any

import pytest
from table import floors, markdown, medians, report

LIMITS = {
    "machine": {"cpu": "test", "num_cores": 2, "features": ["avx2"], "load_average": 0.0},
    "read_bytes_per_s": {"ordinary_pages": 1e9, "huge_pages": 2e9},
    "product_flop_per_s": {"bf16": 1e11, "f32": 1e10},
}
MODEL = {"name": "tiny", "layer_parameters": 9_000_000, "head_parameters": 1_000_000, "bytes_per_parameter": 2}
LOAD = {"input_tokens": 128, "output_tokens": 64, "streams": [1, 32]}


def served(rate: float, ttft_s: float) -> dict[str, Any]:
    part = {"gaps_us": [[1000, 2000]], "num_ended_early": 0, "client_cpu_share": 0.01, "tokens_per_s": rate}
    part |= {"decode_tokens_per_s": rate * 2, "ttft_s": [ttft_s, ttft_s, 9.0]}
    steps = {"count": 4, "sum": 0.002}
    part["metrics"] = {f'penstock_step_overhead_seconds_{kind}{{method="decode"}}': n for kind, n in steps.items()}
    process = {"command": "server", "rss_bytes": 2_000_000, "pss_bytes": 1_000_000}
    return {
        "loads": dict.fromkeys(("1 streams", "32 streams", "ttft 512", "decode"), part),
        "memory": [process],
        "metrics": {},
    }


RECORD = {
    "command": "compare.py",
    "started": "2026-01-01",
    "revision": "abc",
    "limits": LIMITS,
    "limits_after": LIMITS,
    "torch_rss_bytes": 0,
    "model": MODEL,
    "load": LOAD,
    "servers": {"penstock": {}, "llama.cpp": {}},
    "repeats": [
        {"penstock": served(100, 0.1), "llama.cpp": served(50, 0.2)},
        {"penstock": served(300, 0.3), "llama.cpp": {"error": "gone"}},
    ],
}


def test_a_small_step_is_bound_by_memory_and_a_large_one_by_arithmetic() -> None:
    floor = floors(LIMITS, MODEL, LOAD)
    assert floor["decode"] == pytest.approx(100)  # 20 MB at the better of the two bandwidths
    assert floor["ttft 512"] == pytest.approx(2 * (9e6 * 512 + 1e6) / 1e11)
    assert floor["32 streams"] > floor["1 streams"]


def test_a_failed_repeat_is_left_out_of_the_median() -> None:
    rows = medians(RECORD)
    assert rows["penstock"]["1 streams"] == 200
    assert rows["llama.cpp"]["1 streams"] == 50


def test_ratios_above_one_are_faster_for_rates_and_for_times() -> None:
    ratios = report(RECORD).split("Speed relative")[1].splitlines()
    row = next(line for line in ratios if line.startswith("| penstock"))
    assert row.split("|")[2:6] == [" 4.00            ", " 4.00             ", " 1.00            ", " 4.00         "]


def test_step_parts_are_means_over_a_load() -> None:
    steps = report(RECORD).split("Penstock's steps")[1].splitlines()
    row = next(line for line in steps if "decode | 8" in line)
    assert [cell.strip() for cell in row.split("|")[1:5]] == ["1 streams", "decode", "8", "0.50"]


def test_every_line_of_a_table_is_as_wide_as_the_widest() -> None:
    assert len({len(line) for line in markdown(["a", "long"], [["wide cell", "1"]]).splitlines()}) == 1
