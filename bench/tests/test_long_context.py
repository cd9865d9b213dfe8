"""What a step of attention reads and computes, and that every kind of step runs."""

import pytest
import torch
from figure import BENCHMARKS, floor_s
from long_context import KV_DTYPES, LAYERS, Setup, measure, steps_of

LIMITS = {"read_bytes_per_s": {"ordinary_pages": 5e9, "huge_pages": 1e10}, "product_flop_per_s": {"bf16": 1e12}}


def test_a_decode_step_reads_all_keys_and_values_once() -> None:
    cell = Setup("Llama 3 8B", "bf16", 32768, 8).cell(1)
    assert cell["kv_bytes"] == 8 * 32768 * 4096
    assert cell["flop"] == 8 * 32768 * 32 * 128 * 4
    assert floor_s(cell, LIMITS) == pytest.approx(8 * 32768 * 4096 / 1e10)
    assert Setup("Llama 3 8B", "fp8", 32768, 8).cell(1)["kv_bytes"] == 8 * 32768 * 2048


def test_a_token_of_a_chunk_attends_to_those_before_it() -> None:
    setup = Setup("SmolLM2 135M", "bf16", 8192, 1)
    cell = setup.cell(512)
    assert cell["flop"] == sum(range(8192 - 511, 8193)) * 9 * 64 * 4
    assert floor_s(cell, LIMITS) == cell["flop"] / 1e12
    record = {"cells": {"chunk": cell}, "repeats": [{"limits": LIMITS, "seconds": {"chunk": 2 * cell["flop"] / 1e12}}]}
    (figure,) = BENCHMARKS["long-context"](record)
    assert figure.values == [0.5]


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_step_of_a_short_context_runs(layer: str, kv: str) -> None:
    setup = Setup(layer, kv, 64, 16)
    with torch.inference_mode():
        seconds = measure(setup, min_bytes=1)
    assert seconds.keys() == {setup.name(new) for new in steps_of(setup)}
    assert steps_of(setup) == (1, 32)
    assert min(seconds.values()) > 0
