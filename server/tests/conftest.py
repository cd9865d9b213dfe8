"""Fixtures of all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from penstock_server.prepare import prepare


@pytest.fixture(scope="session", autouse=True)
def triton_language_stays_patched() -> None:
    """PERF: Triton's interpreter patches its language at each call of a kernel, and of a function in a kernel. That
    takes half of the time of the kernels' tests. Nothing compiles kernels in these processes."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is None:
        return
    import triton.language as tl

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()  # with nothing to restore


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache; returns $HF_HOME."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def embedded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a prepared folder. Tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        return Path(prepare(None).folder)


@pytest.fixture
def on_tested_device() -> Iterator[None]:
    """Tensors are made on the tested device."""
    from tested_device import DEVICE

    with DEVICE:
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For ranks that are threads, and for small operators: on a busy machine they spend their time in barriers."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
