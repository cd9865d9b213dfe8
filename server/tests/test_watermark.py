"""Green lists and the detector, without a model; test_embedded_model.py has one generate the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from penstock_server import watermark
from penstock_server.engine.watermark import Watermark
from penstock_server.errors import ConfigError
from penstock_server.watermark import GreenLists, detect


@pytest.mark.parametrize("vocab", [7, 997, 49_152])
@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_every_list_has_its_share_of_the_vocabulary_and_lists_differ(vocab: int, gamma: float) -> None:
    lists = GreenLists(vocab, gamma)
    every = np.arange(vocab)
    greens = np.stack([lists.are_green(np.full(vocab, previous), every) for previous in range(7)])
    assert greens.sum(1).tolist() == [int(gamma * vocab)] * 7
    if vocab > 7:
        overlap = (greens[:-1] & greens[1:]).sum(1) / vocab
        assert np.abs(overlap - gamma**2).max() < 0.1


def test_a_token_is_green_behind_a_share_gamma_of_all_tokens() -> None:
    lists = GreenLists(49_152, 0.5)
    previous = np.arange(20_000)
    shares = [lists.are_green(previous, np.full_like(previous, token)).mean() for token in (0, 1, 2, 1000, 49_151)]
    assert np.abs(np.array(shares) - 0.5).max() < 0.02


def test_the_processor_adds_delta_to_the_green_and_to_nothing_else() -> None:
    lists = GreenLists(300, 0.3)
    scores = torch.randn(3, 300)
    before = scores.clone()
    room = torch.empty(3, 320, dtype=torch.int64)
    Watermark(lists, 1.5, torch.device("cpu")).apply(scores, torch.tensor([0, 2]), np.array([7, 299]), room)
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


def test_repeating_a_pair_says_nothing_new() -> None:
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
