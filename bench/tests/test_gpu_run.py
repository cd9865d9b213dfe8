"""The run on a GPU machine is made of parts: each has a result at once, and a run continues where it was cut off."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "packaging" / "gpu.py"


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with two parts; the second one fails."""
    module = load_program()
    parts = {name: [sys.executable, "-c", f"print('ran {name}'); exit({code})"] for name, code in (("a", 0), ("b", 3))}
    monkeypatch.setattr(module, "parts_of", lambda device, out, quick: parts)
    monkeypatch.setattr(module, "environment", lambda device, site: None)
    return module


def test_each_part_runs_once_and_failures_are_counted(program: ModuleType, tmp_path: Path) -> None:
    for _ in range(2):
        assert program.run("cpu", tmp_path, False, 60.0, None) == 1
    results = json.loads((tmp_path / "parts.json").read_text())
    assert {name: result["status"] for name, result in results.items()} == {"a": 0, "b": 3}
    log = (tmp_path / "run.log").read_text()
    assert log.splitlines().count("ran a") == log.splitlines().count("ran b") == 1


def test_a_run_without_time_leaves_its_parts_to_the_next(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.run("cpu", tmp_path, False, 60.0, ["a"]) == 0
    assert program.run("cpu", tmp_path, False, 0.0, None) == 1
    assert "left: b" in capsys.readouterr().out
    assert program.run("cpu", tmp_path, False, 60.0, None) == 1
    assert set(json.loads((tmp_path / "parts.json").read_text())) == {"a", "b"}


def test_an_unknown_part_is_refused(program: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--parts c; there are a, b"):
        program.run("cpu", tmp_path, False, 60.0, ["c"])


def test_every_test_of_the_tested_device_is_in_a_part() -> None:
    program, tests = load_program(), ROOT / "server" / "tests"
    listed = {tests / name for name in (*program.KERNEL_TESTS, *program.MODEL_TESTS, *program.PARITY_TESTS)}
    uses_device = re.compile(r"^from tested_device import .*\bDEVICE\b", re.MULTILINE)
    assert {path for path in tests.rglob("test_*.py") if uses_device.search(path.read_text())} == listed


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_part_of_a_small_run_passes_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "run", "--device", "cpu", "--quick", "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert all(path.stat().st_size <= 16 << 20 for path in files)
