"""The playground's committed files are built from its sources, and its unit tests pass."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from node import install, needs_node

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "playground"
BUILT = ROOT / "router" / "src" / "http" / "playground"

pytestmark = needs_node


@pytest.fixture(scope="module")
def packages() -> None:
    install(SOURCE)


def run(*command: str) -> None:
    result = subprocess.run(
        ["npm", "run", "--silent", *command], cwd=SOURCE, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.usefixtures("packages")
def test_the_committed_files_are_those_of_the_sources(tmp_path: Path) -> None:
    run("build", "--", str(tmp_path))
    names = sorted(path.name for path in BUILT.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (BUILT / name).read_bytes(), (
            f"{name} is outdated: run `make playground`"
        )


@pytest.mark.usefixtures("packages")
def test_units() -> None:
    run("test")
