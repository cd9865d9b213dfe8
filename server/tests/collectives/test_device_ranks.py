"""Two ranks on GPUs compute what one does: on one device by gloo, as on a CPU, and on two devices by NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock_server.parallel import RankGroup
from program_environment import program_environment
from rank_program import run
from tested_device import DEVICE
from tiny_models import make_model, prompts, save_model

PROGRAM = Path(__file__).parents[1] / "programs" / "rank_program.py"
NUM_DEVICES = torch.cuda.device_count() if DEVICE.type == "cuda" else 0
ON_GPU = pytest.mark.skipif(NUM_DEVICES < 1, reason="needs a GPU (PENSTOCK_TEST_DEVICE)")
ON_TWO = pytest.mark.skipif(NUM_DEVICES < 2, reason=f"NCCL needs two GPUs for two ranks, there are {NUM_DEVICES}")


def run_ranks(
    folder: Path, size: int, texts: list[list[int]], num_tokens: int, dtype: str, exact: bool, device: str
) -> Any:
    """What rank 0 found. device: as of `rank_program`."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, str(PROGRAM), str(folder), dtype, str(rank), str(size)),
                    *(f"file://{place}/rendezvous", str(out), json.dumps(texts), str(num_tokens)),
                    "exact" if exact else "summed",
                    device,
                ],
                env=program_environment(),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            errors = [process.communicate(timeout=240)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)
        return torch.load(out)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda:0", marks=[pytest.mark.gpu, ON_GPU]),
        pytest.param("cuda", marks=[pytest.mark.gpu, ON_TWO]),
    ],
)
def test_two_ranks_compute_what_one_does(device: str, exact: bool, tmp_path: Path) -> None:
    """Every number that ranks exchange: exact or summed layers, a vocabulary in parts, and the choice of a token."""
    folder = save_model(make_model("llama-biases"), tmp_path)
    texts = prompts(11, [19, 33, 1], 131)
    one = run(folder, "float32", RankGroup(), texts, 8, device=torch.device(device))
    both = run_ranks(folder, 2, texts, 8, "float32", exact, device)
    torch.testing.assert_close(both["logits"], one["logits"], atol=1e-4, rtol=1e-4)
    assert both["tokens"] == one["tokens"]
    assert both["smallest"] < one["weight_bytes"]
