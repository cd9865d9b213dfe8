"""The GPU benchmark, tiny and on a CPU, so that its one run on a GPU does not fail on a typo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from result import read

PROGRAM = Path(__file__).parents[1] / "gpu.py"


@pytest.mark.timeout(900)  # the benchmark has the time that other tests leave it
@pytest.mark.parametrize(
    "quantized",
    # `test_predict` takes steps of the other formats.
    [["tiny-q4k"], pytest.param([f"tiny-{name}" for name in ("w4", "fp8", "w8a8")], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_every_load_of_tiny_models_is_measured_and_a_result_is_resumed_where_it_ended(
    quantized: list[str], tmp_path: Path
) -> None:
    raw = tmp_path / "gpu.json.gz"

    def models(*names: str) -> dict[str, Any]:
        options = ["--model", *names, "--device", "cpu", "--repeats", "1", "--resume", str(raw)]
        subprocess.run([sys.executable, str(PROGRAM), *options], check=True)
        return read(raw)["models"]

    first = models("tiny")["tiny"]
    found = models("tiny", *quantized)
    assert found["tiny"] == first
    for name in quantized:
        (repeat,) = found[name]["repeats"]
        assert (set(repeat["streams"]), set(repeat["ttft_s"])) == ({"1", "4"}, {"16", "100"})
    (repeat,) = first["repeats"]
    assert {num: len(found["step_s"]) for num, found in repeat["streams"].items()} == {"1": 50, "4": 50}
    assert {num: len(found["step_s"]) for num, found in repeat["drafts"].items()} == {"0": 50, "1": 50, "3": 50}
    assert set(repeat["ttft_s"]) == {"16", "100"}
    assert set(repeat["batches"]) == {"4 × 16 / 4"}
    assert set(repeat["beside_long_prompt"]) == {"without", "with"}
    assert first["transformers_tokens_per_s"] > 0
    assert set(repeat["streams"]["1"]["phases_s"]) == {"prepare_s", "forward_s", "sample_s", "idle_s", "draft_s"}
    loads = {"decode, 1 streams", "decode, 4 streams", "prompt, 16 tokens", "prompt, 100 tokens"}
    assert all(set(each["predicted"]) == loads and each["is_complete"] for each in found.values())
