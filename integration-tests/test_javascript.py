"""The JavaScript clients: their test files run by node against the real binary."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from binary import Server

FOLDER = Path(__file__).parent / "javascript"

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="the JavaScript clients need node and npm"
)


@pytest.fixture(scope="module")
def packages() -> None:
    """The packages of the lock file, installed once."""
    lock, stamp = FOLDER / "package-lock.json", FOLDER / "node_modules" / ".package-lock.json"
    if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=FOLDER, check=True, timeout=240)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.test.mjs")))
def test_javascript_client(server: Server, name: str) -> None:
    result = subprocess.run(
        ["node", "--test", "--test-reporter=spec", name],
        cwd=FOLDER,
        env={**os.environ, "PENSTOCK_URL": server.url},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
