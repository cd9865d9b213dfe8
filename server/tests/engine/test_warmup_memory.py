"""After warm-up no allocation fails: the most expensive real steps need no more memory than warm-up measured."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from penstock_server.engine import capacity, memory, warmup
from penstock_server.prepare import prepare
from penstock_server.protocol.message import tokens_message
from penstock_server.protocol.plan import Tokens
from program_environment import program_environment


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("kind", ["process", "tensors"])
def test_the_most_expensive_real_steps_need_no_more_memory_than_warm_up_measured(kind: str) -> None:
    program = Path(__file__).parents[1] / "programs" / "memory_program.py"
    command = [sys.executable, str(program), kind, str(prepare(None).folder)]
    finished = subprocess.run(
        command, env=program_environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout.splitlines()[-1])
    assert 0 < figures["needed"] <= figures["promised"], figures


def test_results_and_known_tokens_are_counted() -> None:
    """The results of two steps, as Python objects and as messages."""
    top = tuple((50_000 + place, -1.5 - place) for place in range(20))
    tokens = Tokens(np.array([50_000]), np.array([-1.5]), {0: top})
    objects = sum(map(sys.getsizeof, (*top, *(part for pair in top for part in pair))))
    columns = tokens.ids.nbytes + tokens.logprobs.nbytes
    assert objects + sys.getsizeof(top) + columns + 4 * tokens_message(tokens).ByteSize() < capacity._RESULT_BYTES
    few = warmup.WorstStep(16, 4, 100, max_context_tokens=400, block_tokens=4)
    many = replace(few, max_step_sequences=5)
    assert capacity.unseen_bytes(many) - capacity.unseen_bytes(few) > 100 * (sys.getsizeof(1 << 20) + 8 + 4 + 4)


def test_touching_pages_keeps_their_contents() -> None:
    tensor = torch.arange(1 << 20)
    thread = memory.touch_pages_in_background([tensor])
    if thread is not None:
        thread.join()
        memory.touch_pages([tensor])
        assert torch.equal(tensor, torch.arange(1 << 20))


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are read from /proc")
@pytest.mark.parametrize("keeps_contents", [True, False])
def test_every_page_of_the_pool_is_backed(monkeypatch: pytest.MonkeyPatch, keeps_contents: bool) -> None:
    if not keeps_contents:  # as before Linux 5.14
        monkeypatch.setattr(memory, "_advise", lambda pages, advice: False)
    before = memory._status_bytes("VmRSS")
    # Not from the heap, which may have resident pages.
    tensors = [torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.float32) for _ in range(2)]
    thread = memory.touch_pages_in_background(tensors)
    assert keeps_contents == (thread is not None)
    if thread is not None:
        thread.join()
    assert memory._status_bytes("VmRSS") - before > 120 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the pages")
def test_released_pages_are_fresh_at_their_next_use() -> None:
    tensor = torch.ones(1 << 20)
    memory.release_pages([tensor, torch.ones(3)])
    assert int(tensor.count_nonzero()) < 2 * mmap.PAGESIZE // tensor.itemsize, "only partial pages keep their contents"
    assert torch.equal(tensor.fill_(2.0), torch.full((1 << 20,), 2.0))
