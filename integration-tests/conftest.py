"""Running servers for all tests that do not change them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from binary import Server, start
from client import ask

if TYPE_CHECKING:
    from pooling_model import Served


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = start("--max-concurrent-requests", "96")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def document(server: Server) -> Any:
    """The OpenAPI document."""
    return ask(server, "/api-doc/openapi.json").json


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves an embedding model."""
    from pooling_model import serve_encoder  # imports torch and transformers, which few tests need

    yield from serve_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from pooling_model import serve_reranker

    yield from serve_reranker(tmp_path_factory.mktemp("reranker"))
