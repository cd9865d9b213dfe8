"""Runs the tests of the JavaScript clients with node against the real binary."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from binary import Server

FOLDER = Path(__file__).parent / "javascript"
UNREACHABLE = ("ECONNREFUSED", "ECONNRESET", "EAI_AGAIN", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT")  # npm's error codes

pytestmark = pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm")


@pytest.fixture(scope="module")
def packages() -> None:
    """Install the packages of the lock file once. Skips the tests if the registry cannot be reached."""
    lock, stamp = FOLDER / "package-lock.json", FOLDER / "node_modules" / ".package-lock.json"
    if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return
    install = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
    result = subprocess.run(install, cwd=FOLDER, capture_output=True, text=True, timeout=240)
    if any(code in result.stderr for code in UNREACHABLE):
        pytest.skip(f"needs the npm registry: {result.stderr.strip().splitlines()[0]}")
    assert result.returncode == 0, result.stderr


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
