"""A model that is loaded before the fork: all workers share its pages, and compute the bits of a model of their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from penstock_server.engine.load import Preloaded
from penstock_server.host import nvidia
from penstock_server.prepare import prepare
from penstock_server.protocol.config import LoadConfig
from program_environment import program_environment

PROGRAM = Path(__file__).parents[1] / "programs" / "preload_program.py"


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.skipif(nvidia.DRIVER.exists(), reason="the fork server of GPUs loads no model")
def test_workers_share_a_models_pages_and_answer_as_with_a_model_of_their_own() -> None:
    environment = {**program_environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(PROGRAM), prepare(None).folder]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    (*sharing, own) = [line.split() for line in lines]
    assert [has_model for has_model, *_ in sharing] == ["True", "True"]
    for _, tokens, taken, weight_bytes in sharing:
        assert tokens == own[1]
        assert int(taken) < int(weight_bytes) / 5
    assert int(own[2]) > int(own[3])


def test_a_gpus_workers_load_the_model_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path)
    assert Preloaded.of(LoadConfig(tmp_path)) is None


def test_a_model_is_used_only_with_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_server.engine import load
    from penstock_server.engine.device import choose_device
    from penstock_server.parallel import RankGroup

    options = load.load_options(LoadConfig(Path("a"), device="cpu"), choose_device("cpu", 0))
    group = RankGroup.join(0, 1, "", "gloo", None)
    monkeypatch.setattr(load, "load_model", lambda options, group: "its own")
    preloaded = Preloaded(options, "shared")  # type: ignore[arg-type]
    assert preloaded.load_model(options, group) == "shared"
    assert preloaded.load_model(replace(options, folder=Path("b")), group) == "its own"
