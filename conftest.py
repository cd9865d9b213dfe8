"""Rules for the tests of all folders: their surroundings, which share a process, what they draw, and which need native
operators."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import settings
from surroundings import make_definite
from tested_isa import use_tested_isa

# First, because what is imported below may read variables.
make_definite()

# Other processes share the cores, so threads that wait at an OpenMP barrier must not spin. The conftest.py of a folder
# below may import torch, which reads this.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# Triton decides at its import whether kernels are interpreted, on the CPU, or compiled. On a GPU, set it to 0. The
# conftest.py of a folder below may import it, so `pytest_configure` would be too late.
os.environ.setdefault("TRITON_INTERPRET", "1")


# hypothesis's own profile for CI: the same examples in every run, and no deadlines, which a loaded machine misses.
# `pytest --hypothesis-profile default` draws new ones.
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-isa", metavar="ISA", help="instruction set of the native kernels, instead of the fastest")


def pytest_configure(config: pytest.Config) -> None:
    if isa := config.getoption("--cpu-isa"):
        os.environ["CPU_ISA"] = isa  # for servers, and for programs of the tests
    try:
        use_tested_isa()
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: a file's tests share servers, so they share a process, unless a test names its group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    # Without groups, each process starts all servers and makes all models, and nothing else tells of it.
    if hasattr(session.config, "workerinput") and session.config.getoption("loadgroup"):
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist knows no groups of tests"
    # PERF: every engine collects garbage while it starts. What the imports made stays, and need not be looked at again.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind, in Triton, reports objects that are left at the exit


def pytest_runtest_setup(item: pytest.Item) -> None:
    # What a test draws without a generator of its own must not depend on the tests that its process ran before.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if item.get_closest_marker("native") is None:
        return
    import torch
    from penstock_server.device.native.build import find_build

    if find_build(torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("needs the native operators: penstock_kernels with kernels for this CPU")
