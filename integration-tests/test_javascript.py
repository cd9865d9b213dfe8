"""Runs the tests of the JavaScript clients with node against the real binary."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from binary import Server
from node import install, needs_node

FOLDER = Path(__file__).parent / "javascript"

pytestmark = needs_node


@pytest.fixture(scope="module")
def packages() -> None:
    install(FOLDER)


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
