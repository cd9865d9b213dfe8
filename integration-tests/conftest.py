"""One running server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from binary import Server, start


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = start("--max-concurrent-requests", "96")
    yield running
    assert running.stop() == 0
