"""Sampling compared with transformers' processors row by row, with the distribution, and across batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine import cut, head
from penstock_server.engine import sampler as sampler_module
from penstock_server.engine.logprob import tops_of
from penstock_server.engine.random import uniform
from penstock_server.engine.sampler import BROKEN, Sampled, Sampler
from penstock_server.engine.sampling import SAMPLING_FIELDS, Composition, compose, names_tokens, record, refusal
from penstock_server.engine.watermark import Watermark
from penstock_server.protocol.plan import Sampling
from penstock_server.watermark import GreenLists
from sample_at_once import sample_at_once
from transformers.generation import logits_process as hf

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


Row = dict[str, Any]


class Listed:
    """A History made of lists."""

    def __init__(self, positions: list[int], prompts: list[list[int]], generated: list[list[int]]) -> None:
        self.prompts, self.behind = prompts, generated
        self.at = positions

    def positions(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.array(self.at)[places]

    def num_generated(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.array([len(self.behind[place]) for place in places])

    def previous_ids(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.array([(self.prompts[place] + self.behind[place])[-1] for place in places])

    def known(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        ids = [self.prompts[place] + self.behind[place] for place in places]
        longest = max(map(len, ids))
        return np.array([row + row[:1] * (longest - len(row)) for row in ids], np.int64)

    def generated(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        lengths = np.array([len(self.behind[place]) for place in places])
        columns = np.arange(max(1, lengths.max()))
        ids = [(self.behind[place] + [0] * len(columns))[: len(columns)] for place in places]
        return np.array(ids, np.int64), columns < lengths[:, None]


def request_for(
    rows: list[Row], positions: list[int], prompts: list[list[int]], generated: list[list[int]]
) -> tuple[Composition, Listed]:
    samplings = [Sampling(**row) for row in rows]
    assert not any(refusal(sampling, 1 << 40) for sampling in samplings)
    naming = {place: sampling for place, sampling in enumerate(samplings) if names_tokens(sampling)}
    composition = compose(np.array([record(sampling) for sampling in samplings], SAMPLING_FIELDS), naming)
    return composition, Listed(positions, prompts, generated)


def sample(
    logits: torch.Tensor,
    rows: list[Row],
    positions: list[int] | None = None,
    histories: list[list[int]] | None = None,
    generated: list[list[int]] | None = None,
) -> Sampled:
    """`histories` are the prompts; `generated` follows them."""
    prompts, behind = histories or [[0]] * len(rows), generated or [[] for _ in rows]
    request = request_for(rows, positions or [0] * len(rows), prompts, behind)
    vocab = logits.shape[1]
    return sample_at_once(Sampler(vocab, CPU, len(rows), Watermark.of(vocab)), logits, *request)


def oracle_scores(logits: torch.Tensor, row: Row, prompt: list[int], behind: Sequence[int] = ()) -> torch.Tensor:
    """One row through transformers' processors, or a formula where it has none, in the protocol's order."""
    asked, ids = Sampling(**row), torch.tensor([[*prompt, *behind]])
    scores = logits.float()[None].clone()
    vocab = scores.shape[1]
    if asked.watermark:
        green = GreenLists(vocab).are_green(np.full(vocab, ids[0, -1]), np.arange(vocab))
        scores[0, torch.from_numpy(green)] += 2.0
    if asked.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(ids, scores)
    for token, count in Counter(behind).items():
        scores[0, token] -= asked.frequency_penalty * count + asked.presence_penalty
    for token, bias in asked.logit_bias:
        scores[0, token] += bias
    if asked.min_new_tokens and asked.stop_token_ids:
        stops = list(asked.stop_token_ids)
        scores = hf.MinNewTokensLengthLogitsProcessor(len(prompt), asked.min_new_tokens, stops, device=CPU)(ids, scores)
    if asked.temperature != 1:
        scores = hf.TemperatureLogitsWarper(asked.temperature)(ids, scores)
    if not asked.do_sample:
        return scores[0]
    if asked.top_k:
        scores = hf.TopKLogitsWarper(asked.top_k)(ids, scores)
    if asked.top_p < 1:
        scores = hf.TopPLogitsWarper(asked.top_p)(ids, scores)
    if asked.typical_p < 1:
        scores = hf.TypicalLogitsWarper(asked.typical_p)(ids, scores)
    if asked.min_p:
        scores = hf.MinPLogitsWarper(asked.min_p)(ids, scores)
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
    {"do_sample": True, "typical_p": 0.3},
    {"do_sample": True, "typical_p": 0.95},
    {"do_sample": True, "typical_p": 0.5, "top_p": 0.9, "top_k": 60, "min_p": 0.02},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"do_sample": True, "presence_penalty": 3.0, "repetition_penalty": 1.4, "top_p": 0.9},
    {"logit_bias": ((3, 4.0), (5, -100.0), (3, 1.5)), "top_n": 4},
    {"min_new_tokens": 3, "stop_token_ids": (1, 4), "logit_bias": ((4, 50.0),)},
    {"watermark": True},
    {"do_sample": True, "watermark": True, "frequency_penalty": 0.3, "temperature": 0.8, "top_p": 0.95, "top_n": 3},
    {"top_n": 5},
]


@pytest.mark.parametrize("vocab", [7, 64, 1000, 20_000])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_tokens_and_logprobs_agree_with_transformers_processors(vocab: int, scale: float) -> None:
    settings_ = SETTINGS * 3
    logits = random_logits(len(settings_), vocab, scale)
    prompts = [[(i * 7 + j * 13) % vocab for j in range(1 + i % 9)] for i in range(len(settings_))]
    behind = [[(i * 5 + j * 3) % min(vocab, 4) for j in range(i % 6)] for i in range(len(settings_))]
    rows: list[Row] = [{**row, "seed": seed} for seed, row in enumerate(settings_)]
    sampled = sample(logits, rows, list(range(len(rows))), prompts, behind)
    for place, row in enumerate(rows):
        expected = torch.log_softmax(oracle_scores(logits[place], row, prompts[place], behind[place]).double(), -1)
        token, logprob = int(sampled.ids[place]), float(sampled.logprobs[place])
        assert expected[token] > -math.inf, f"{row} chose a token that the oracle removed"
        # transformers adds up in float32, which moves the cut by a token or two of thousands.
        tolerance = 5e-4 if row.get("typical_p") or row.get("top_p") else 3e-5
        assert logprob == pytest.approx(float(expected[token]), abs=tolerance)
        if not row.get("do_sample"):
            assert token == int(expected.argmax())
        if row.get("top_n"):
            best = expected.topk(min(row["top_n"], int((expected > -math.inf).sum())))
            assert [top_id for top_id, _ in tops_of(sampled.alternatives)[place]] == best.indices.tolist()
            assert [lp for _, lp in tops_of(sampled.alternatives)[place]] == pytest.approx(
                best.values.tolist(), abs=tolerance
            )
        assert (place in tops_of(sampled.alternatives)) == bool(row.get("top_n"))


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_cut_found_in_the_head_equals_that_of_the_whole_row(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (random_logits(200, 20_000, scale) * 8).round() / 8  # many equals
    rows: list[Row] = [
        {"do_sample": True, "seed": place, **SETTINGS[7 + place % 10], "repetition_penalty": 1.0}
        for place in range(200)
    ]
    quick = sample(logits, rows)
    monkeypatch.setattr(head, "is_worth_it", lambda probs: False)
    full = sample(logits, rows)
    assert quick.ids.tolist() == full.ids.tolist()
    assert quick.logprobs.tolist() == full.logprobs.tolist()


def test_among_equals_top_p_keeps_the_first_ids_and_typical_p_keeps_all() -> None:
    draws = 400
    logits = torch.zeros(1, 100).expand(draws, -1)
    for row, kept in (({"top_p": 0.095}, 10), ({"typical_p": 0.1}, 100)):
        rows = [{"do_sample": True, "seed": 1, **row}] * draws
        sampled = sample(logits, rows, positions=list(range(draws)))
        assert int(sampled.ids.max()) < kept
        assert float(sampled.logprobs[0]) == pytest.approx(-math.log(kept), abs=1e-6)


def test_alternatives_are_best_first_and_lower_ids_first_among_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0, 7.0, 5.0]])
    assert [top_id for top_id, _ in tops_of(sample(logits, [{"top_n": 4}]).alternatives)[0]] == [4, 1, 2, 5]


def test_truncated_tokens_are_alternatives_only_in_the_model_s_own_distribution() -> None:
    logits = random_logits(1, 300, 2.0)
    row: Row = {"do_sample": True, "top_k": 2, "top_n": 5, "temperature": 0.5}
    assert len(tops_of(sample(logits, [row]).alternatives)[0]) == 2
    own = sample(logits, [{**row, "model_logprobs": True}])
    best = torch.log_softmax(logits[0].double(), -1).topk(5)
    assert [top_id for top_id, _ in tops_of(own.alternatives)[0]] == best.indices.tolist()
    assert [logprob for _, logprob in tops_of(own.alternatives)[0]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_alternatives_whose_probability_underflows_have_finite_logprobs() -> None:
    sampled = sample(torch.tensor([[0.0, 90.0, 50.0]]), [{"temperature": 0.1, "top_n": 3}])
    assert [top_id for top_id, _ in tops_of(sampled.alternatives)[0]] == [1, 2, 0]
    assert [logprob for _, logprob in tops_of(sampled.alternatives)[0]] == pytest.approx([0, -400, -900])


def test_a_stop_token_is_allowed_once_enough_tokens_were_generated() -> None:
    logits = torch.tensor([[0.0, 9.0, 5.0]] * 2)
    row: Row = {"min_new_tokens": 2, "stop_token_ids": (1,)}
    assert sample(logits, [row, row], generated=[[2], [2, 2]]).ids.tolist() == [2, 1]


def test_greedy_rows_have_the_same_bits_in_a_batch_with_alternatives() -> None:
    logits = random_logits(6, 1000, 2.0).bfloat16()
    alone = sample(logits, [{}] * 6)
    mixed = sample(logits, [{"top_n": 3} if place % 2 else {} for place in range(6)])
    assert mixed.ids.tolist() == alone.ids.tolist()
    assert mixed.logprobs[::2].tolist() == alone.logprobs.double()[::2].tolist()
    assert sorted(tops_of(mixed.alternatives)) == [1, 3, 5]


@given(
    values=st.lists(st.lists(st.integers(0, 40), min_size=9, max_size=9), min_size=1, max_size=4),
    share=st.floats(0.01, 1.0),
)
@settings(max_examples=100, deadline=None)
def test_a_cut_equals_that_of_sorting_and_summing(values: list[list[int]], share: float) -> None:
    weights = torch.tensor(values) * 3 + 1
    probs = weights / 128.0
    room = cut.Room(len(values), 9, CPU)
    keys = cut.descending_keys(probs, room)
    mass = cut.target_of(torch.full((len(values),), share, dtype=torch.float64), weights.sum(-1))
    cut.keep(probs, keys, cut.find_cut(keys, weights, mass, room), room, all_equals=False)
    for place, row in enumerate(weights.tolist()):
        order = sorted(range(9), key=lambda token: (-row[token], token))
        kept: list[int] = []
        while sum(row[token] for token in kept) < int(mass[place]):
            kept.append(order[len(kept)])
        assert probs[place].nonzero().squeeze(1).tolist() == sorted(kept)


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
        {"typical_p": 0.6},
        {"top_k": 12, "top_p": 0.8, "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [20, 200])
def test_samples_follow_the_distribution(row: Row, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = 20_000
    monkeypatch.setitem(sampler_module._CHUNK_ROWS, "cpu", 200)  # the histograms of all rows would take 2.7 GB
    logits = random_logits(1, vocab, 1.5, seed=5)
    sampled = sample(
        logits.expand(draws, -1), [{**row, "do_sample": True, "seed": 11}] * draws, positions=list(range(draws))
    )
    probs = torch.softmax(oracle_scores(logits[0], {**row, "do_sample": True}, [0]).double(), -1)
    counts = torch.bincount(sampled.ids, minlength=vocab)
    assert counts[probs == 0].sum() == 0
    expected = probs * draws
    common = expected >= 5
    chi_square = float(((counts - expected) ** 2 / expected)[common].sum())
    degrees = int(common.sum()) - 1
    # The seeds are fixed, so this is deterministic; 4 standard deviations of a chi-square distribution.
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
        assert oracle_scores(logits[place], {**row, "do_sample": True}, [0])[int(sampled.ids[place])] > -math.inf


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
    behind = [[(place * j) % 5 for j in range(place % 7)] for place in range(num_rows)]
    together = sample(logits, rows, list(range(num_rows)), histories, behind)
    for place in range(num_rows):
        alone = sample(logits[place : place + 1], [rows[place]], [place], [histories[place]], [behind[place]])
        assert int(alone.ids[0]) == int(together.ids[place])
        assert tops_of(alone.alternatives).get(0) == tops_of(together.alternatives).get(place)
        assert float(alone.logprobs[0]) == float(together.logprobs[place])


def test_a_large_vocabulary_gives_the_same_bits_for_any_number_of_rows_and_threads() -> None:
    logits = random_logits(20, 49_152, 2.0).bfloat16()
    kinds: list[Row] = [{}, {"top_p": 0.95, "top_n": 2}, {"top_k": 50}, {"typical_p": 0.8}, {"watermark": True}]
    rows: list[Row] = [{"do_sample": place % 5 > 0, **kinds[place % 5], "seed": place} for place in range(20)]
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
def test_a_broken_row_is_reported_and_changes_no_other_row(row: Row, poison: float | str, dtype: torch.dtype) -> None:
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


def test_a_broken_row_does_not_affect_later_batches() -> None:
    logits = random_logits(1, 100, 2.0)
    row: Row = {"temperature": 0.5}
    sampler = Sampler(100, CPU, 4, Watermark.of(100))
    request = request_for([row], [0], [[0]], [[]])
    expected = sample_at_once(sampler, logits, *request)
    assert int(sample_at_once(sampler, torch.full((1, 100), math.nan), *request).ids[0]) == BROKEN
    again = sample_at_once(sampler, logits, *request)
    assert (int(again.ids[0]), float(again.logprobs[0])) == (int(expected.ids[0]), float(expected.logprobs[0]))


def test_a_sampler_chooses_the_same_tokens_after_it_has_given_back_its_memory() -> None:
    rows: list[Row] = [{"temperature": 5.0, "top_p": 0.9, "seed": seed, "model_logprobs": True} for seed in range(8)]
    logits, request = random_logits(8, 5001, 1.0), request_for(rows, [0] * 8, [[0]] * 8, [[]] * 8)
    sampler = Sampler(5001, CPU, 8, Watermark.of(5001))
    before = sample_at_once(sampler, logits, *request)
    sampler.release()
    assert torch.equal(sampler._scores[:, 5001:], torch.full((8, 55), -math.inf))
    after = sample_at_once(sampler, logits, *request)
    assert torch.equal(before.ids, after.ids)
    assert torch.equal(before.logprobs, after.logprobs)


def test_a_measurement_processes_the_first_chunk_and_estimates_the_others() -> None:
    rows: list[Row] = [{"do_sample": True, "seed": 3, "logit_bias": ((0, -100.0),), "model_logprobs": True}] * 40
    logits, request = random_logits(40, 100, 2.0), request_for(rows, [0] * 40, [[1]] * 40, [[]] * 40)
    sampler = Sampler(100, CPU, 40, Watermark.of(100))
    expected = sample_at_once(sampler, logits, *request).ids.tolist()
    num_rows = sampler.chunk_rows
    with sampler.first_chunks_only() as measured:
        assert sample_at_once(sampler, logits, *request).ids.tolist() == expected[:num_rows] + [0] * (40 - num_rows)
    assert 0 not in expected
    assert measured.skipped_s > 0
    assert sample_at_once(sampler, logits, *request).ids.tolist() == expected


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
    torch.testing.assert_close(short.logprobs.double(), long.logprobs.double(), atol=1e-5, rtol=0)


def test_only_seed_and_position_decide_a_random_choice() -> None:
    logits = random_logits(1, 5000, 0.5).expand(3, -1)
    rows: list[Row] = [{"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 2}]
    ids = sample(logits, rows, [4, 4, 4]).ids.tolist()
    assert ids[0] == ids[1] != ids[2]
    assert sample(logits[:1], rows[:1], [5]).ids.tolist() != ids[:1]
