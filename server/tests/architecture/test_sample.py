"""Warm-up measures steps with one layer of each kind: they must need the memory of the whole model's steps."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from model_driver import ModelDriver
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts

# Layers of one kind; of two kinds by attention or by MLP; an encoder, whose model is not cut.
NUM_SAMPLED = {"llama": 1, "gemma2": 2, "deepseek-v3": 2, "t5": None}


@pytest.mark.parametrize("name", NUM_SAMPLED)
def test_a_sample_needs_the_temporary_memory_of_the_whole_model(name: str, tmp_path: Path) -> None:
    save_model(make_model(name, CASES[name]), tmp_path)
    model = load_model(LoadOptions(tmp_path, torch.float32, torch.device("cpu"), block_tokens=4), RankGroup())
    driver = ModelDriver(model)
    num_source = 20 if model.traits.max_source_tokens else 0
    needed = peak_bytes(driver, num_source)
    sample = model.sample()
    assert sample.traits.num_layers == (NUM_SAMPLED[name] or model.traits.num_layers) <= model.traits.num_layers
    driver.model = sample
    assert needed <= peak_bytes(driver, num_source) <= 1.1 * needed


def peak_bytes(driver: ModelDriver, num_source: int) -> int:
    """The most bytes that tensors of a step occupy at a time."""
    texts = prompts(3, [40, 30], VOCAB)
    sequences = [driver.sequence(text, num_source) for text in texts]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        driver.step([(sequence, len(sequence.token_ids)) for sequence in sequences])
    for sequence in sequences:
        driver.free(sequence)
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
