"""Rules for the tests of all folders: which tests share a process, and which need the native operators."""

from __future__ import annotations

import os

import pytest

# Triton decides at its import whether kernels are interpreted, on the CPU, or compiled. On a GPU, set it to 0. The
# conftest.py of a folder below may import it, so `pytest_configure` would be too late.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    # Several test processes share the cores. Threads that wait at an OpenMP barrier must not spin on them; torch is not
    # imported yet, so the setting takes effect.
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: a file's tests share servers, so they share a process, unless a test names its group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("native") is None:
        return
    import torch
    from penstock_server.kernels.native_build import find_build

    if find_build(torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("needs the native operators: penstock_kernels with kernels for this CPU")
