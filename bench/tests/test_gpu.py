"""The GPU benchmark, tiny and on a CPU, so that its one run on a GPU does not fail on a typo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "gpu.py"


def test_every_load_of_the_tiny_model_is_measured(tmp_path: Path) -> None:
    options = ["--model", "tiny", "tiny-w4", "tiny-q4k", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(PROGRAM), *options], check=True, timeout=240)
    (raw,) = tmp_path.glob("*-gpu.json")
    models = json.loads(raw.read_text())["models"]
    for name in ("tiny-w4", "tiny-q4k"):
        (repeat,) = models[name]["repeats"]
        assert (set(repeat["streams"]), set(repeat["ttft_s"])) == ({"1", "4"}, {"16", "100"})
    model = models["tiny"]
    (repeat,) = model["repeats"]
    assert {num: len(found["step_s"]) for num, found in repeat["streams"].items()} == {"1": 50, "4": 50}
    assert set(repeat["ttft_s"]) == {"16", "100"}
    assert set(repeat["batches"]) == {"4 × 16 / 4"}
    assert set(repeat["beside_long_prompt"]) == {"without", "with"}
    assert model["transformers_tokens_per_s"] > 0


def test_the_prediction_for_llama_8b_is_its_size() -> None:
    command = [sys.executable, str(PROGRAM), "--predict", "--model", "llama-8b", "llama-8b-w4"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    dense, quantized = (
        [int(cell.replace(",", "")) for cell in line.split("|")[2:-1]]
        for line in printed.stdout.splitlines()
        if "llama-8b" in line
    )
    assert 14.9e9 < dense[0] < 15.1e9  # 8.03 billion parameters, without the input embedding
    assert dense[0] == 2 * dense[2]
    assert 4.6e9 < quantized[0] < 4.7e9
    assert dense[1] == quantized[1] == 131072
