"""Runs the tests in `frameworks/` against the real binary, in an environment that `make chaos` installs: the frameworks
bring many packages, whose versions contradict those of the development dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from binary import Server

FOLDER = Path(__file__).parent / "frameworks"
PYTHON = Path(sys.prefix) / "frameworks" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_clients_of_frameworks_are_answered(server: Server) -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}, which make chaos installs")
    result = subprocess.run(
        [
            PYTHON,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "--confcutdir",
            FOLDER,
            "-c",
            FOLDER / "pytest.ini",
            FOLDER / "clients.py",
        ],
        env={**os.environ, "PENSTOCK_URL": server.url},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout
