"""Drafts change no bit of sequences with adapters, which share their steps with sequences of the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from penstock_server.config import WarmUpConfig
from penstock_server.engine import Engine
from penstock_server.engine.drafting import ngram
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.parallel import RankGroup
from penstock_server.plan import Adapter
from test_adapters import load, make_adapter, save
from test_drafts import (  # the fixture is used by its name
    BLOCK_TOKENS,
    NUM_BLOCKS,
    Drafts,
    compiler,  # noqa: F401
    generate,
)
from tiny_models import prompts

pytestmark = pytest.mark.native


def test_drafts_change_no_bit_of_sequences_with_adapters(
    tmp_path: Path,
    compiler: GrammarCompiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save("llama", CASES["llama"], tmp_path / "base")
    one, _ = make_adapter(tmp_path / "one", folder, 1)
    other, _ = make_adapter(tmp_path / "other", folder, 2, r=3)
    adapters = [Adapter(1, one), None, Adapter(2, other)]
    model = load(folder, dtype=torch.bfloat16)
    engine = Engine(model, RankGroup(), torch.device("cpu"), BLOCK_TOKENS, compiler=compiler)
    engine.warm_up(WarmUpConfig(max_step_tokens=128, max_step_sequences=64, num_blocks=NUM_BLOCKS, proven=True))
    texts = prompts(3, [6 + 11 * i % 30 for i in range(6)], VOCAB)
    plain, num_plain_steps = generate(engine, texts, 0, max_drafts=0, adapters=adapters)
    of_base, _ = generate(engine, texts, 0, max_drafts=0)
    for i, (tokens, others) in enumerate(zip(plain, of_base, strict=True)):
        assert (tokens == others) == (adapters[i % 3] is None)
    known = [text + [token.id for token in tokens] for text, tokens in zip(texts, plain, strict=True)]
    monkeypatch.setattr(ngram, "continuation", Drafts(known))
    drafted, num_steps = generate(engine, texts, 0, max_drafts=6, adapters=adapters)
    assert drafted == plain
    assert num_steps < num_plain_steps, "some drafts are right"
