"""Green lists and the detector, without a model; in test_embedded_model.py a model generates the text."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from penstock_server import watermark
from penstock_server.engine.sampler import Sampler
from penstock_server.engine.watermark import Watermark
from penstock_server.errors import ConfigError
from penstock_server.watermark import GreenLists, detect
from sample_at_once import sample_at_once
from test_sampler import request_for


@pytest.mark.parametrize("vocab", [7, 997, 49_152])
@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_every_list_has_a_share_gamma_of_the_vocabulary_and_lists_differ(vocab: int, gamma: float) -> None:
    lists = GreenLists(vocab, gamma)
    every = np.arange(vocab)
    greens = np.stack([lists.are_green(np.full(vocab, previous), every) for previous in range(7)])
    assert greens.sum(1).tolist() == [int(gamma * vocab)] * 7
    if vocab > 7:
        overlap = (greens[:-1] & greens[1:]).sum(1) / vocab
        assert np.abs(overlap - gamma**2).max() < 0.1


def test_a_token_is_green_after_a_share_gamma_of_all_tokens() -> None:
    lists = GreenLists(2000, 0.5)
    previous = np.arange(2000)
    shares = [lists.are_green(previous, np.full_like(previous, token)).mean() for token in (0, 1, 2, 1000, 1999)]
    assert np.abs(np.array(shares) - 0.5).max() < 0.05


def tgi_green_ids(previous_id: int, vocab_size: int, gamma: float) -> torch.Tensor:
    """The green list by TGI's recipe, step by step."""
    rng = torch.Generator(device="cpu")
    rng.manual_seed(15485863 * previous_id)
    greenlist_size = int(vocab_size * gamma)
    vocab_permutation = torch.randperm(vocab_size, device="cpu", generator=rng)
    return vocab_permutation[:greenlist_size]


def tgi_z_score(ids: list[int], vocab_size: int, gamma: float) -> float:
    """A detector written from that recipe: green tokens among all pairs, compared with their expectation."""
    num_green = sum(token in tgi_green_ids(previous, vocab_size, gamma) for previous, token in itertools.pairwise(ids))
    num = len(ids) - 1
    return (num_green - gamma * num) / math.sqrt(num * gamma * (1 - gamma))


@pytest.mark.parametrize(("vocab", "gamma"), [(997, 0.5), (997, 0.25), (49_152, 0.5)])
def test_the_green_lists_are_tgi_s(vocab: int, gamma: float) -> None:
    lists = GreenLists(vocab, gamma)
    for previous in (0, 1, 42, vocab - 1):
        green = np.flatnonzero(lists.are_green(np.full(vocab, previous), np.arange(vocab)))
        assert green.tolist() == sorted(tgi_green_ids(previous, vocab, gamma).tolist())


def test_a_list_evicted_from_the_cache_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermark, "_CACHE_BYTES", 3 * 125)
    few, previous = GreenLists(997), np.array([1, 2, 3, 4, 1, 5, 2, 2, 1])
    assert (few.bits(previous) == GreenLists(997).bits(previous)).all()
    assert len(few._place_of) == 3


def test_forgotten_lists_are_computed_again() -> None:
    lists, previous = GreenLists(997), np.array([1, 2, 3])
    expected = lists.bits(previous)
    lists.forget().fill(0)
    assert (lists.bits(previous) == expected).all()


@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_a_detector_of_tgi_s_recipe_finds_the_sampler_s_watermark(gamma: float) -> None:
    sampler = Sampler(997, torch.device("cpu"), 2, Watermark.of(997, gamma, 4.0))
    texts = [[5], [5]]
    for position in range(1, 120):
        rows = [{"do_sample": True, "seed": 3, "watermark": marked} for marked in (True, False)]
        logits = torch.randn(2, 997, generator=torch.Generator().manual_seed(position))
        request = request_for(rows, [position] * 2, texts, [[], []])
        for text, token in zip(texts, sample_at_once(sampler, logits, *request).ids.tolist(), strict=True):
            text.append(token)
    assert tgi_z_score(texts[0], 997, gamma) > 6
    assert abs(tgi_z_score(texts[1], 997, gamma)) < 3


def test_the_processor_adds_delta_to_green_logits_only() -> None:
    lists = GreenLists(300, 0.3)
    scores = torch.randn(3, 300)
    before = scores.clone()
    watermark = Watermark(lists, 1.5)
    watermark.apply(scores, torch.tensor([0, 2]), torch.from_numpy(watermark.green(np.array([7, 299]))))
    for row, previous in ((0, 7), (2, 299)):
        green = torch.from_numpy(lists.are_green(np.full(300, previous), np.arange(300)))
        torch.testing.assert_close(scores[row], before[row] + 1.5 * green)
    assert torch.equal(scores[1], before[1])


def green_text(lists: GreenLists, length: int) -> list[int]:
    ids = [1]
    while len(ids) < length:
        ids.append(
            next(i for i in range(len(ids) * 31 % 900, 997) if lists.are_green(np.array(ids[-1:]), np.array([i])))
        )
    return ids


def test_green_text_is_detected_and_random_text_is_not() -> None:
    lists = GreenLists(997)
    found = detect(green_text(lists, 50), lists)
    assert (found.green_fraction, found.z_score) == (1.0, pytest.approx(found.num_scored**0.5))
    assert found.p_value < 1e-9
    scores = [detect(np.random.default_rng(seed).integers(0, 997, 400).tolist(), lists).z_score for seed in range(200)]
    assert max(scores) < 4
    assert abs(float(np.mean(scores))) < 0.3
    assert float(np.std(scores)) == pytest.approx(1, abs=0.2)


def test_a_repeated_pair_counts_once() -> None:
    lists = GreenLists(997)
    assert detect([5, 6] * 100, lists).num_scored == 2


def test_the_command_reads_ids_and_gives_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 997}')
    ids = green_text(GreenLists(997), 60)
    plain, listed, short = tmp_path / "plain", tmp_path / "listed", tmp_path / "short"
    plain.write_text(" ".join(map(str, ids)))
    listed.write_text(json.dumps([{"id": token, "text": "x"} for token in ids]))
    short.write_text("5")
    for file in (plain, listed):
        assert watermark.main([str(tmp_path), str(file), "--ids"]) == 0
        assert "verdict         watermarked" in capsys.readouterr().out
    assert watermark.main([str(tmp_path), str(plain), "--ids", "--threshold", "50"]) == 1
    assert watermark.main([str(tmp_path), str(short), "--ids"]) == 2
    assert capsys.readouterr().err == "error: the text has 1 tokens, at least 2 are needed\n"
    assert watermark.main([str(tmp_path), str(plain)]) == 2, "text needs a tokenizer"
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("ids", [[1, 997], [-1, 2]])
def test_ids_outside_of_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="outside of the vocabulary of 997"):
        detect(ids, GreenLists(997))
