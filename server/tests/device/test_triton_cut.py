"""Truncation and alternatives as CUDA devices compute them, in Triton's interpreter, against those of a CPU: the same
bits, among equals too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine.constraint import Constrainer
from penstock_server.engine.cut import Room
from penstock_server.engine.logprob import best_ids, best_ids_on_device
from penstock_server.engine.truncation import ALL, Truncation, truncate, truncate_in_kernels
from tested_device import DEVICE, triton_skip_reason
from torch._subclasses import FakeTensorMode

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton import greedy as triton_greedy

# numpy's, of the interpreter: a GPU computes with infinities as well, and says nothing.
pytestmark = [
    pytest.mark.usefixtures("on_tested_device"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
LIMITS: dict[str, tuple[Any, ...]] = {  # neutral, then what is asked for
    "top_k": (0, 1, 2, 7, 40, 100_000),
    "top_p": (1.0, 1e-9, 0.3, 0.9, 0.999999),
    "typical_p": (1.0, 0.01, 0.4, 0.95),
    "min_p": (0.0, 0.01, 0.5, 1.0),
}


def truncation(rows: list[dict[str, Any]]) -> Truncation:
    columns = {name: [row.get(name, values[0]) for row in rows] for name, values in LIMITS.items()}
    types = {"top_k": torch.int64, "min_p": torch.float32}
    tensors = (torch.tensor(column, dtype=types.get(name, torch.float64)) for name, column in columns.items())
    return Truncation(*tensors, frozenset(name for row in rows for name in row))


def assert_same(probs: torch.Tensor, rows: list[dict[str, Any]]) -> None:
    found = probs.clone()
    truncate_in_kernels(found, truncation(rows), Room(*probs.shape, DEVICE))
    with torch.device("cpu"):
        expected = probs.cpu()
        truncate(expected, truncation(rows), Room(*probs.shape, expected.device))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_each_limit_cuts_as_on_a_cpu(scale: float) -> None:
    rows = [{name: value} for name, values in LIMITS.items() for value in values[1:]]
    logits = torch.randn(len(rows), 4160, generator=torch.Generator(DEVICE).manual_seed(1)) * scale
    logits[:, 4100:] = -torch.inf  # as beyond the vocabulary
    assert_same(logits.softmax(-1), rows)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_limits_cut_as_on_a_cpu(data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(
            st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in LIMITS.items()}),
            min_size=1,
            max_size=3,
        )
    )
    weights = data.draw(
        st.lists(
            st.lists(st.integers(0, 6), min_size=64, max_size=64).filter(any), min_size=len(rows), max_size=len(rows)
        )
    )
    counts = torch.tensor(weights, dtype=torch.float32)
    assert_same(counts / counts.sum(-1, keepdim=True), rows)


def test_rows_that_ask_for_nothing_are_untouched() -> None:
    probs = torch.rand(3, 128).softmax(-1)
    truncated = probs.clone()
    truncate_in_kernels(
        truncated, truncation([{"top_k": 3}, {}, {"top_p": 0.1, "typical_p": 0.2}]), Room(3, 128, DEVICE)
    )
    assert torch.equal(truncated[1], probs[1])
    assert (truncated[0] > 0).sum() == 3
    assert truncation([{}]).asked == frozenset()
    assert truncation([dict.fromkeys(ALL, 0.5)]).asked == ALL


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_greedy_choice_is_that_of_a_softmax(vocab: int, is_masked: bool) -> None:
    logits = (torch.randn(6, vocab, generator=torch.Generator(DEVICE).manual_seed(2)) * 4).round()  # with equals
    logits[1, 3], logits[2, vocab - 1], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, : vocab - 1] = -torch.inf
    allowed, masks = torch.ones_like(logits, dtype=torch.bool), None
    if is_masked:
        places = np.array([0, 1, 5])
        bits = np.random.default_rng(3).integers(0, 2, (3, -(-vocab // 32) * 32), np.uint8)
        bits[2] = 0  # allows nothing
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        masks = torch.from_numpy(places), torch.from_numpy(words)
        allowed[torch.from_numpy(places).to(DEVICE)] = torch.from_numpy(bits[:, :vocab] == 1).to(DEVICE)
    ids, logprobs = triton_greedy.choose(logits, masks)
    expected = logits.masked_fill(~allowed, -torch.inf).double().log_softmax(-1)
    is_broken = torch.tensor([False, True, True, True, False, is_masked])
    best = torch.where(is_broken, -1, (expected == expected.amax(-1, keepdim=True)).int().argmax(-1))
    assert ids.tolist() == best.tolist()
    torch.testing.assert_close(logprobs[~is_broken].double(), expected.amax(-1)[~is_broken], atol=1e-5, rtol=1e-5)
    assert logprobs[is_broken].isnan().all()


@given(
    scores=st.lists(
        st.lists(st.sampled_from([-np.inf, -3.5, -0.0, 0.0, 1e-30, 2.0, 2.0, 7.0]), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    num=st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_alternatives_are_ranked_as_on_a_cpu(scores: list[list[float]], num: int) -> None:
    rows = torch.tensor(scores, dtype=torch.float32)
    assert torch.equal(best_ids_on_device(rows, min(num, 6)).cpu(), best_ids(rows.cpu(), num))


def test_masks_are_applied_without_waiting_for_the_device() -> None:
    cuda = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode() as mode:
        from_numpy = torch.from_numpy
        patch.setattr(torch, "from_numpy", lambda array: mode.from_tensor(from_numpy(array)))
        scores, words = torch.empty(3, 32, device=cuda), torch.empty(2, 1, dtype=torch.int32, device=cuda)
        Constrainer(cuda).apply(scores, torch.empty(2, dtype=torch.int64, device=cuda), words)
