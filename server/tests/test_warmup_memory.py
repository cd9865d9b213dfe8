"""After the warm-up no allocation fails: the worst steps of real plans need no more than what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from penstock_server.engine import memory
from penstock_server.prepare import prepare

# What the heap's fragments and the kernel's count of pages differ by between runs.
NOISE_BYTES = 2 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_the_worst_real_steps_need_no_more_than_the_warm_up_saw() -> None:
    program = Path(__file__).with_name("memory_program.py")
    command = [sys.executable, str(program), str(prepare(None).folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert said.returncode == 0, said.stderr
    figures = json.loads(said.stdout.splitlines()[-1])
    assert 0 < figures["needed"] <= figures["promised"] + NOISE_BYTES, figures


def test_touching_pages_keeps_what_they_hold() -> None:
    tensor = torch.arange(1 << 20)
    memory.touch_pages_beside([tensor])
    if memory._populate(tensor):
        memory.touch_pages([tensor])
    assert torch.equal(tensor, torch.arange(1 << 20))
