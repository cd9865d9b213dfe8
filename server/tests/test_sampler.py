"""Sampling against a per-row oracle of transformers' processors, against the distribution, and against neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine import head, nucleus
from penstock_server.engine import sampler as sampler_module
from penstock_server.engine.random import uniform
from penstock_server.engine.sampler import BROKEN, Sampled, Sampler, SampleRequest
from penstock_server.engine.sequence import SAMPLING_FIELDS
from transformers.generation import logits_process as hf

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operators on a busy machine spend their time in OpenMP's barriers otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NEUTRAL = {
    "do_sample": False,
    "seed": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "model_logprobs": False,
}
Row = dict[str, float | int | bool]


def records(rows: list[Row]) -> npt.NDArray[np.void]:
    out = np.zeros(len(rows), SAMPLING_FIELDS)
    for place, row in enumerate(rows):
        out[place] = tuple({**NEUTRAL, **row}[name] for name in SAMPLING_FIELDS.names or ())
    return out


def sample(
    logits: torch.Tensor, rows: list[Row], positions: list[int] | None = None, histories: list[list[int]] | None = None
) -> Sampled:
    positions = positions or [0] * len(rows)
    known = histories or [[0]] * len(rows)

    def history(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        longest = max(len(known[place]) for place in places)
        return np.array([known[p] + [known[p][0]] * (longest - len(known[p])) for p in places], np.int64)

    sampler = Sampler(logits.shape[1], CPU, len(rows))
    return sampler.sample(logits, SampleRequest(records(rows), np.array(positions), history))


def oracle_scores(logits: torch.Tensor, row: Row, history: list[int]) -> torch.Tensor:
    """One row through transformers' processors, in TGI's order."""
    row = {**NEUTRAL, **row}
    scores, ids = logits.float()[None], torch.tensor([history])
    if row["repetition_penalty"] != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(float(row["repetition_penalty"]))(ids, scores)
    if row["temperature"] != 1:
        scores = hf.TemperatureLogitsWarper(float(row["temperature"]))(ids, scores)
    if row["top_k"]:
        scores = hf.TopKLogitsWarper(int(row["top_k"]))(ids, scores)
    if row["top_p"] < 1:
        scores = hf.TopPLogitsWarper(float(row["top_p"]))(ids, scores)
    if row["min_p"]:
        scores = hf.MinPLogitsWarper(float(row["min_p"]))(ids, scores)
    return scores[0]


def random_logits(rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


SETTINGS: list[Row] = [
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 0.5},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1e-6},
    {"do_sample": True, "top_k": 1},
    {"do_sample": True, "top_k": 50},
    {"do_sample": True, "top_k": 3000},
    {"do_sample": True, "top_k": 100_000},
    {"do_sample": True, "top_p": 0.01},
    {"do_sample": True, "top_p": 0.5},
    {"do_sample": True, "top_p": 0.95},
    {"do_sample": True, "top_p": 0.999999},
    {"do_sample": True, "min_p": 0.1},
    {"do_sample": True, "min_p": 1e-7},
    {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 1.5, "repetition_penalty": 1.2, "min_p": 0.01},
    {"repetition_penalty": 0.7, "temperature": 2.0},
]


@pytest.mark.parametrize("vocab", [7, 64, 1000, 20_000])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_tokens_and_logprobs_agree_with_transformers_processors(vocab: int, scale: float) -> None:
    settings_ = SETTINGS * 3
    logits = random_logits(len(settings_), vocab, scale)
    histories = [[(i * 7 + j * 13) % vocab for j in range(1 + i % 9)] for i in range(len(settings_))]
    rows: list[Row] = [{**row, "seed": seed} for seed, row in enumerate(settings_)]
    sampled = sample(logits, rows, list(range(len(rows))), histories)
    for place, row in enumerate(rows):
        expected = torch.log_softmax(oracle_scores(logits[place], row, histories[place]).double(), -1)
        token, logprob = int(sampled.ids[place]), float(sampled.logprobs[place])
        assert expected[token] > -math.inf, f"{row} chose a token that the oracle removed"
        assert logprob == pytest.approx(float(expected[token]), abs=2e-5)
        if not row.get("do_sample"):
            assert token == int(expected.argmax())


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_looking_at_the_head_chooses_as_a_full_sort_does(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (random_logits(200, 20_000, scale) * 8).round() / 8  # many equals
    rows: list[Row] = [
        {"do_sample": True, "seed": place, **SETTINGS[7 + place % 10], "repetition_penalty": 1.0}
        for place in range(200)
    ]
    quick = sample(logits, rows)
    monkeypatch.setattr(nucleus, "finders", lambda probs: (head._everything,))
    full = sample(logits, rows)
    assert quick.ids.tolist() == full.ids.tolist()
    assert quick.logprobs.tolist() == full.logprobs.tolist()


@pytest.mark.parametrize(
    "row", [{"top_p": 0.97}, {"top_k": 3000}, {"min_p": 1e-3}, {"top_k": 500, "top_p": 0.9}, {"top_p": 0.1}], ids=str
)
def test_no_row_is_sorted_as_a_whole_even_when_flat(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nucleus, "finders", lambda probs: (head._columns, head._above_bound, pytest.fail))
    logits = random_logits(8, 20_000, 0.3)
    sample(logits, [{**row, "do_sample": True, "seed": place} for place in range(8)])


def test_model_logprobs_are_of_the_untouched_distribution() -> None:
    logits = random_logits(4, 500, 3.0)
    row: Row = {"do_sample": True, "temperature": 3.0, "top_k": 5, "repetition_penalty": 1.5, "model_logprobs": True}
    sampled = sample(logits, [{**row, "seed": seed} for seed in range(4)])
    expected = torch.log_softmax(logits.double(), -1).gather(1, sampled.ids[:, None]).squeeze(1)
    torch.testing.assert_close(sampled.logprobs, expected, atol=1e-5, rtol=0)


def test_a_very_unlikely_token_has_a_finite_model_logprob() -> None:
    logits = torch.tensor([[200.0] + [0.0] * 99])
    sampled = sample(logits, [{"do_sample": True, "temperature": 1e6, "model_logprobs": True, "seed": 1}])
    assert int(sampled.ids[0]) != 0
    assert float(sampled.logprobs[0]) == pytest.approx(-200, abs=1e-3)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.8, "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [20, 200])
def test_samples_follow_the_distribution(row: Row, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = 20_000
    monkeypatch.setitem(sampler_module._CHUNK_ROWS, "cpu", draws)
    logits = random_logits(1, vocab, 1.5, seed=5)
    sampled = sample(
        logits.expand(draws, -1), [{**row, "do_sample": True, "seed": 11}] * draws, positions=list(range(draws))
    )
    probs = torch.softmax(oracle_scores(logits[0], row, [0]).double(), -1)
    counts = torch.bincount(sampled.ids, minlength=vocab)
    assert counts[probs == 0].sum() == 0
    expected = probs * draws
    common = expected >= 5
    chi_square = float(((counts - expected) ** 2 / expected)[common].sum())
    degrees = int(common.sum()) - 1
    # Seeds are fixed, so this cannot flicker; 4 standard deviations of a chi-square distribution.
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


def test_random_numbers_are_uniform_and_unrelated_across_seeds_and_positions() -> None:
    positions = np.arange(1000, dtype=np.int64)
    grid = np.stack([uniform(np.full(1000, seed, np.uint64), positions) for seed in range(100)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 4 * math.sqrt(2 * 99)
    for moved in (grid[1:], grid[:, 1:]):
        still = grid[: moved.shape[0], : moved.shape[1]]
        assert abs(np.corrcoef(moved.ravel(), still.ravel())[0, 1]) < 0.02
    assert len(np.unique(grid)) == grid.size


def test_the_largest_random_number_does_not_choose_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 1 - 2.0**-52
    monkeypatch.setattr("penstock_server.engine.sampler.uniform", lambda seeds, positions: np.full(len(seeds), largest))
    logits = random_logits(4, 300, 2.0)
    logits[:, 250:] = -math.inf
    rows: list[Row] = [{}, {"top_p": 0.5}, {"top_k": 400}, {"min_p": 0.3}]
    sampled = sample(logits, [{**row, "do_sample": True} for row in rows])
    for place, row in enumerate(rows):
        assert oracle_scores(logits[place], row, [0])[int(sampled.ids[place])] > -math.inf


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_is_bit_identical_alone_and_in_any_batch(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([100, 2048, 5000]))
    num_rows = data.draw(st.integers(2, 40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = random_logits(num_rows, vocab, data.draw(st.sampled_from([0.2, 2.0])), seed=num_rows).to(dtype)
    rows: list[Row] = [
        {**data.draw(st.sampled_from(SETTINGS)), "seed": place, "model_logprobs": data.draw(st.booleans())}
        for place in range(num_rows)
    ]
    histories = [[(place + j) % vocab for j in range(1 + place)] for place in range(num_rows)]
    together = sample(logits, rows, list(range(num_rows)), histories)
    for place in range(num_rows):
        alone = sample(logits[place : place + 1], [rows[place]], [place], [histories[place]])
        assert int(alone.ids[0]) == int(together.ids[place])
        assert float(alone.logprobs[0]) == float(together.logprobs[place])


def test_a_large_vocabulary_gives_the_same_bits_for_any_number_of_rows_and_threads() -> None:
    logits = random_logits(20, 49_152, 2.0).bfloat16()
    kinds: list[Row] = [{}, {"do_sample": True}, {"do_sample": True, "top_p": 0.95}, {"do_sample": True, "top_k": 50}]
    rows: list[Row] = [{**kinds[place % 4], "seed": place} for place in range(20)]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        together = sample(logits, rows)
        results.append((together.ids.tolist(), together.logprobs.tolist()))
        alone = [sample(logits[place : place + 1], [rows[place]]) for place in range(20)]
        results.append(([int(one.ids) for one in alone], [float(one.logprobs) for one in alone]))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("row", SETTINGS, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_row_is_reported_and_its_neighbours_do_not_notice(
    row: Row, poison: float | str, dtype: torch.dtype
) -> None:
    logits = random_logits(5, 100, 2.0).to(dtype)
    rows: list[Row] = [{**row, "seed": seed} for seed in range(5)]
    clean = sample(logits, rows)
    poisoned = logits.clone()
    if poison == "all -inf":
        poisoned[2] = -math.inf
    else:
        poisoned[2, 50] = float(poison)
    sampled = sample(poisoned, rows)
    assert int(sampled.ids[2]) == BROKEN
    for place in (0, 1, 3, 4):
        assert int(sampled.ids[place]) == int(clean.ids[place])
        assert float(sampled.logprobs[place]) == float(clean.logprobs[place])


def test_a_broken_row_leaves_nothing_behind_for_later_batches() -> None:
    logits = random_logits(1, 100, 2.0)
    row: Row = {"temperature": 0.5}
    sampler = Sampler(100, CPU, 4)
    request = SampleRequest(records([row]), np.array([0]), lambda places: np.zeros((len(places), 1), np.int64))
    expected = sampler.sample(logits, request)
    assert int(sampler.sample(torch.full((1, 100), math.nan), request).ids[0]) == BROKEN
    again = sampler.sample(logits, request)
    assert (int(again.ids[0]), float(again.logprobs[0])) == (int(expected.ids[0]), float(expected.logprobs[0]))


def test_equal_logits_go_to_the_lowest_id_when_greedy() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [300, 70, 999]] = 1.0
    assert int(sample(logits, [{}]).ids[0]) == 70


def test_top_k_keeps_equals_of_the_last_one() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(400, -1)
    sampled = sample(logits, [{"do_sample": True, "top_k": 2, "seed": 1}] * 400, positions=list(range(400)))
    assert set(sampled.ids.tolist()) == {0, 1, 2, 3}


def test_bf16_greedy_agrees_with_float32() -> None:
    logits = random_logits(33, 5001, 2.0).bfloat16()
    rows: list[Row] = [{}] * 33
    short, long = sample(logits, rows), sample(logits.float(), rows)
    assert short.ids.tolist() == long.ids.tolist()
    torch.testing.assert_close(short.logprobs.double(), long.logprobs, atol=1e-5, rtol=0)


def test_seed_and_position_alone_decide() -> None:
    logits = random_logits(1, 5000, 0.5).expand(3, -1)
    rows: list[Row] = [{"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 2}]
    ids = sample(logits, rows, [4, 4, 4]).ids.tolist()
    assert ids[0] == ids[1] != ids[2]
    assert sample(logits[:1], rows[:1], [5]).ids.tolist() != ids[:1]
