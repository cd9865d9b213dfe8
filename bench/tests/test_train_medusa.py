from __future__ import annotations

import itertools
import random
from pathlib import Path

import peers
import pytest
import speculation
import torch
import train_medusa
from penstock_server.device.attention import preferred_block_tokens
from penstock_server.device.attention.interface import StepBatch
from safetensors.torch import load_file


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words = ["abbey", "canvas", "river"]
    monkeypatch.setattr(peers, "prompt_words", lambda: words)
    return words


def test_no_question_is_one_of_the_benchmark(few_words: list[str]) -> None:
    asked = set(train_medusa.questions(400))
    draw = random.Random(0)
    assert len(asked) > 50
    assert not asked & {speculation.chat(few_words, draw)["inputs"] for _ in range(100)}


class Repeating:
    """A model whose output is the token it reads."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        for index, (start, end) in enumerate(itertools.pairwise(batch.query_starts.tolist())):
            assert batch.positions[start:end].tolist() == list(range(end - start))
            assert batch.context_lens[index] == end - start
            blocks = batch.slots[start:end] // preferred_block_tokens(torch.device("cpu"), torch.bfloat16)
            assert set(blocks.tolist()) <= set(batch.block_tables[index].tolist())
        return batch.token_ids[batch.sample_rows, None].float()


def test_an_output_is_that_from_which_a_token_of_the_answer_was_sampled() -> None:
    chats = [(list(range(first, first + 5)), 2) for first in range(train_medusa.CHATS_PER_STEP + 3)]
    chats.append(([90, 91, 92], 1))
    outputs = list(train_medusa.outputs_of(Repeating(), chats))  # type: ignore[arg-type]
    assert [found[:, 0].tolist() for found in outputs] == [ids[asked - 1 : -1] for ids, asked in chats]


def test_head_number_n_predicts_the_token_n_places_after_the_sampled_one() -> None:
    token_ids = torch.tensor([11, 12, 13, 15])
    chats = [([7, 8, 11, 12, 13, 14, 15], 2)]
    rows = train_medusa.rows_of(train_medusa.outputs_of(Repeating(), chats), chats, token_ids)  # type: ignore[arg-type]
    assert rows.outputs[:, 0].tolist() == [8, 11, 12, 13, 14]
    # Places in token_ids; 14 is not among them.
    assert rows.tokens.tolist() == [
        [0, 1, 2, -100, 3],
        [1, 2, -100, 3, -100],
        [2, -100, 3, -100, -100],
        [-100, 3, -100, -100, -100],
        [3, -100, -100, -100, -100],
    ]


@pytest.mark.parametrize("is_chain", [False, True])
def test_trained_heads_are_right_more_often_and_are_written(
    is_chain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_medusa, "LEARNING_RATE", 0.05)
    torch.manual_seed(0)
    outputs = torch.eye(8, dtype=torch.bfloat16).repeat(100, 1)
    following = torch.arange(8).repeat(100)
    rows = train_medusa.Rows(outputs, torch.stack([(following + distance) % 8 for distance in range(5)], 1))
    heads = train_medusa.Heads(torch.eye(8, dtype=torch.bfloat16), is_chain)
    assert train_medusa.accuracies(heads, rows)[0] == 0
    train_medusa.train(heads, rows, num_epochs=40)
    assert min(train_medusa.accuracies(heads, rows)) == 1
    train_medusa.save(tmp_path, heads, torch.arange(8))
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert {name.split(".", 1)[1] for name in tensors if "." in name} == {"0.linear.weight", "0.linear.bias"}
    assert tensors["0.0.linear.weight"].shape == (8, 16 if is_chain else 8)
    assert tensors["token_ids"].tolist() == list(range(8))


def test_a_chain_learns_what_depends_on_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_medusa, "LEARNING_RATE", 0.05)
    torch.manual_seed(0)
    outputs = torch.zeros(800, 8, dtype=torch.bfloat16)  # tells nothing
    tokens = torch.randint(8, (800, 1))
    rows = train_medusa.Rows(outputs, torch.cat([(tokens + distance) % 8 for distance in range(5)], 1))
    heads = train_medusa.Heads(torch.eye(8, dtype=torch.bfloat16), is_chain=True)
    train_medusa.train(heads, rows, num_epochs=40)
    assert min(train_medusa.accuracies(heads, rows)) == 1
