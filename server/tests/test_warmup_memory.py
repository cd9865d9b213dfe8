"""After the warm-up no allocation fails: the worst steps of real plans need no more than what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from penstock_server.engine import capacity, memory, warmup
from penstock_server.pb import worker_pb2 as pb
from penstock_server.plan import Token
from penstock_server.prepare import prepare
from penstock_server.service import _token


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("kind", ["process", "tensors"])
def test_the_worst_real_steps_need_no_more_than_the_warm_up_saw(kind: str) -> None:
    program = Path(__file__).with_name("memory_program.py")
    command = [sys.executable, str(program), kind, str(prepare(None).folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert said.returncode == 0, said.stderr
    figures = json.loads(said.stdout.splitlines()[-1])
    assert 0 < figures["needed"] <= figures["promised"], figures


def test_results_and_known_tokens_are_counted() -> None:
    """Those of a step and those of the one before it, as they are and as messages."""
    top = tuple((50_000 + place, -1.5 - place) for place in range(20))
    token = Token(50_000, -1.5, top)
    objects = sum(map(sys.getsizeof, (token, *token.top, *(part for pair in token.top for part in pair))))
    result = pb.StepResult(outputs=[pb.SequenceOutput(prompt_tokens=[_token(token)])])
    assert objects + sys.getsizeof(token.top) + 4 * result.ByteSize() < capacity._RESULT_BYTES
    few = warmup.WorstStep(16, 4, 100, max_context_tokens=400, block_tokens=4)
    many = replace(few, max_step_sequences=5)
    assert capacity.unseen_bytes(many) - capacity.unseen_bytes(few) > 100 * (sys.getsizeof(1 << 20) + 8 + 4 + 4)


def test_touching_pages_keeps_what_they_hold() -> None:
    tensor = torch.arange(1 << 20)
    memory.touch_pages_beside([tensor])
    if memory._populate(tensor):
        memory.touch_pages([tensor])
    assert torch.equal(tensor, torch.arange(1 << 20))
