"""Adds the option --models-table."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from models_page import Measured

MEASURED = pytest.StashKey[Measured]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-table", metavar="PATH", help="write what the parity tests measured to this page")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "column(name): the column of docs/models.md that the test stands for")
    config.stash[MEASURED] = Measured()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A failure in a fixture counts as well.
    column, case = item.get_closest_marker("column"), getattr(item, "callspec", None)
    is_outcome = report.failed or (report.when == "call" and not report.skipped)
    if column is not None and case is not None and is_outcome:
        name = case.params.get("made") or case.params["name"]
        item.config.stash[MEASURED].outcome(name, column.args[0], report.passed)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--models-table", None)
    if path is not None:
        session.config.stash[MEASURED].write(Path(path))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    return request.config.stash[MEASURED]
