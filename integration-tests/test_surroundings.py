"""The suite itself: a port, a place, a variable or a signal of a developer's machine decides no test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from binary import TIMEOUT_S

ROOT = Path(__file__).parent.parent
# Each of them failed, or waited for minutes, in a part of these surroundings.
TESTS = [
    "integration-tests/test_lifecycle.py::test_a_busy_port_is_named",
    "integration-tests/test_llm.py::test_ctrl_c_ends_the_call_and_leaves_no_process",
    "integration-tests/test_speculation.py::test_heads_without_weights_are_refused_before_ready",
    "server/tests/penstock/test_bench.py::test_an_interrupted_run_leaves_no_process",
    "server/tests/process/test_fork_server.py::test_its_end_ends_its_workers",
    "server/tests/hub/test_prepare.py::test_without_a_reference_the_embedded_model_is_prepared",
]
IN_A_CONTAINER = ["integration-tests/test_container.py::test_a_server_that_can_write_nowhere_says_what_it_needs"]
SETTINGS = {
    "API_KEY": "a key",
    "CUDA_VISIBLE_DEVICES": "0,1,2",
    "HF_HOME": "/dev/null/hub",
    "HF_TOKEN": "a token",
    "HOME": "/dev/null/home",
    "LC_ALL": "C",
    "LOG_LEVEL": "off",
    "MODEL_ID": "/nonexistent",
    "OMP_NUM_THREADS": "7",
    "PENSTOCK_HUB_RETRIES": "many",
    "PORT": "3000",
    "http_proxy": "http://127.0.0.1:1",
}
# Runs the command after "$1" with signals ignored as in a background job, or as a careless supervisor leaves them.
CARELESSLY = 'trap \'\' INT QUIT HUP CHLD ALRM; umask 077; ulimit -S -n 128; cd "$1"; shift; exec "$@"'
# The same, with the checkout "$0" at "$1".
IN_A_CLONE = f'mount --bind "$0" "$1"; {CARELESSLY}'


@pytest.fixture
def busy_default_port() -> Iterator[None]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # another server has it already
            server.bind(("", 3000))
            server.listen()
        yield


def may_mount() -> bool:
    command = ["unshare", "--mount", "true"]
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.native
def test_surroundings_decide_no_test(tmp_path: Path, busy_default_port: None) -> None:
    folder = tmp_path / ("a temporary folder " + 80 * "x")
    folder.mkdir()
    python = Path(sys.executable)
    if may_mount() and python.is_relative_to(ROOT):
        clone = tmp_path / "penstock's clone"
        clone.mkdir()
        tests, command = TESTS + IN_A_CONTAINER, ["unshare", "--mount", "sh", "-ec", IN_A_CLONE, str(ROOT), str(clone)]
        python = clone / python.relative_to(ROOT)
    else:
        tests, command = TESTS, ["sh", "-ec", CARELESSLY, "sh", str(ROOT)]
    run = subprocess.run(
        [*command, str(python), "-m", "pytest", "-p", "no:cacheprovider", "-rfEs", *tests],
        env={**os.environ, **SETTINGS, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout.splitlines()[-1], run.stdout
