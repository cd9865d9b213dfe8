"""The GPU benchmark, tiny and on a CPU, so that its one run on a GPU does not fail on a typo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "gpu.py"

pytestmark = pytest.mark.timeout(900)  # the benchmark has the time that other tests leave it


def test_every_load_of_the_tiny_model_is_measured(tmp_path: Path) -> None:
    quantized = [f"tiny-{name}" for name in ("w4", "q4k", "fp8", "w8a8")]
    options = ["--model", "tiny", *quantized, "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(PROGRAM), *options], check=True)
    (raw,) = tmp_path.glob("*-gpu.json")
    models = json.loads(raw.read_text())["models"]
    for name in quantized:
        (repeat,) = models[name]["repeats"]
        assert (set(repeat["streams"]), set(repeat["ttft_s"])) == ({"1", "4"}, {"16", "100"})
    model = models["tiny"]
    (repeat,) = model["repeats"]
    assert {num: len(found["step_s"]) for num, found in repeat["streams"].items()} == {"1": 50, "4": 50}
    assert {num: len(found["step_s"]) for num, found in repeat["drafts"].items()} == {"0": 50, "1": 50, "3": 50}
    assert set(repeat["ttft_s"]) == {"16", "100"}
    assert set(repeat["batches"]) == {"4 × 16 / 4"}
    assert set(repeat["beside_long_prompt"]) == {"without", "with"}
    assert model["transformers_tokens_per_s"] > 0
    assert set(repeat["streams"]["1"]["phases_s"]) == {"prepare_s", "forward_s", "sample_s", "idle_s", "draft_s"}
    loads = {"decode, 1 streams", "decode, 4 streams", "prompt, 16 tokens", "prompt, 100 tokens"}
    assert all(set(each["predicted"]) == loads for each in models.values())


def test_a_result_is_resumed_where_it_ended(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--repeats", "1", "--no-peers", "--resume", str(tmp_path / "gpu.json")]

    def models(*names: str) -> dict[str, Any]:
        subprocess.run([sys.executable, str(PROGRAM), *options, "--model", *names], check=True)
        return json.loads((tmp_path / "gpu.json").read_text())["models"]

    first = models("tiny")
    both = models("tiny", "tiny-w4")
    assert both["tiny"] == first["tiny"]
    assert both["tiny-w4"]["is_complete"]
