"""Installs the locked packages of a folder with npm."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

# npm's error codes when the registry cannot be reached, or answers that it cannot serve now.
UNREACHABLE = (
    *("ECONNREFUSED", "ECONNRESET", "EAI_AGAIN", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT"),
    *("EIDLETIMEOUT", "ERR_SOCKET_TIMEOUT", "E429", "E500", "E502", "E503", "E504"),
)
TIMEOUT_S = 200

needs_node = pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm")


def install(folder: Path) -> None:
    """Install the packages of the folder's lock file once. Skips the test if the registry cannot be reached."""
    lock, stamp = folder / "package-lock.json", folder / "node_modules" / ".package-lock.json"
    command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
    with lock.open() as file:
        # Tests run in several processes, and npm removes the folder that another npm is filling.
        fcntl.flock(file, fcntl.LOCK_EX)
        if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
            return
        try:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"needs the npm registry, which has not sent all packages within {TIMEOUT_S} s")
    if any(code in result.stderr for code in UNREACHABLE):
        pytest.skip(f"needs the npm registry: {result.stderr.strip().splitlines()[0]}")
    assert result.returncode == 0, result.stderr
