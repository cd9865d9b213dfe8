"""A prompt and a decode step of every architecture on a fake CUDA device: nothing waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES
from fake_cuda import fake_cuda, load
from penstock_server.plan import Advances, NewSequence, Plan
from tiny_model import save_case

@pytest.mark.parametrize("name", CASES)
def test_steps_do_not_wait_for_the_device(name: str, tmp_path: Path) -> None:
    folder = save_case(name, tmp_path)
    num_source = 3 if CASES[name].has_encoder else 0
    num_tokens = max(5, CASES[name].shortest)
    new = [
        NewSequence(i, [7] * num_tokens, num_tokens, block_ids=[2 * i, 2 * i + 1], num_source_tokens=num_source)
        for i in range(2)
    ]
    with fake_cuda():
        engine = load(folder)
        engine.launch(Plan(1, new_sequences=new, advances=Advances.of([0, 1], [num_tokens] * 2, [True] * 2)))
        engine.launch(Plan(2, advances=Advances.of([0, 1], [1, 1], [True, True])))
        engine.close()
