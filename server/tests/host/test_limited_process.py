"""A job that exceeds a limit of its process ends it, and the next job gets another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from limited_jobs import LIMITS
from penstock_server.host.limited_process import LimitedProcess, ProcessDiedError


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    paths = [str(Path(__file__).parents[1] / "programs"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    process = LimitedProcess("limited_jobs", [])
    yield process
    process.close()


def test_jobs_within_the_limits_share_a_process(process: LimitedProcess) -> None:
    first, data = process.ask({"num_bytes_allocated": LIMITS.memory_bytes // 4}, b"data")
    assert (first["num_bytes_allocated"], data) == (LIMITS.memory_bytes // 4, b"data")
    assert process.ask({})[0]["pid"] == first["pid"]


@pytest.mark.parametrize(
    ("job", "ran_out_of_time"), [({"spins": True}, True), ({"num_bytes_allocated": 2 * LIMITS.memory_bytes}, False)]
)
def test_a_job_that_exceeds_a_limit_ends_its_process_only(
    process: LimitedProcess, job: dict[str, object], ran_out_of_time: bool
) -> None:
    before, _ = process.ask({})
    with pytest.raises(ProcessDiedError) as died:
        process.ask(job)
    assert died.value.ran_out_of_time == ran_out_of_time
    after, _ = process.ask({})
    assert after["pid"] != before["pid"]
