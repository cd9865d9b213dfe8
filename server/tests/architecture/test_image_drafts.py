"""Drafts change no bit of sequences with images, which share their steps with sequences of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_cases import make_image_model
from penstock_server.engine import Engine
from penstock_server.engine.drafting import ngram
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Sampling
from plans import Token
from test_drafts import BLOCK_TOKENS, NUM_BLOCKS, Drafts, generate
from test_images import prompts_of

pytestmark = pytest.mark.native

SAMPLINGS = [
    Sampling(top_n=2),
    Sampling(do_sample=True, seed=1, top_p=0.9),
    Sampling(do_sample=True, seed=2, frequency_penalty=0.5),
    Sampling(repetition_penalty=1.3),
]


# Positions of their own, also with states, layers that attend to images, and image tokens that attend to each other.
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3.5", "mllama", "gemma3"])
def test_drafts_change_no_bit_of_sequences_with_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_drafts.SAMPLINGS", SAMPLINGS)
    make_image_model(name, tmp_path)
    cpu = torch.device("cpu")
    model = load_model(LoadOptions(tmp_path, torch.bfloat16, cpu, BLOCK_TOKENS), RankGroup())
    engine = Engine(model, RankGroup(), cpu, BLOCK_TOKENS)
    engine.warm_up(WarmUpConfig(256, 64, num_blocks=NUM_BLOCKS, num_state_slots=8, proven=True))

    def generated(max_drafts: int) -> tuple[list[list[int]], list[list[Token]], int]:
        assert model.images is not None
        prompts = prompts_of(model.images)
        texts, images = [prompt.token_ids for prompt in prompts], [prompt.spans for prompt in prompts]
        return texts, *generate(engine, texts, 0, max_drafts, images=images)

    texts, plain, num_plain_steps = generated(max_drafts=0)
    known = [text + [token.id for token in tokens] for text, tokens in zip(texts, plain, strict=True)]
    monkeypatch.setattr(ngram, "continuation", Drafts(known, model.traits.vocab_size))
    _, drafted, num_steps = generated(max_drafts=6)
    assert drafted == plain
    assert num_steps < num_plain_steps, "some drafts are right"
    engine.close()
