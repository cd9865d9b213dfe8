"""Drafts change no bit of sequences with adapters, which share their steps with sequences of the base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB
from mtp_checkpoint import Reference
from native_builds import build
from penstock_server.engine import Engine
from penstock_server.engine.drafting import medusa, ngram
from penstock_server.engine.drafting.draft_model import DraftModel
from penstock_server.engine.drafting.interface import Drafter
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Adapter
from safetensors.torch import save_file
from test_adapters import CPU, DENSE_PARTS, load, make_adapter, save
from test_drafts import (  # the fixture is used by its name
    BLOCK_TOKENS,
    NUM_BLOCKS,
    SAMPLINGS,
    Drafts,
    compiler,  # noqa: F401
    generate,
    shapes_of,
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


def dense(folder: Path) -> Path:
    return save("llama", CASES["llama"], folder)


def with_mtp_layer(folder: Path) -> Path:
    return Reference.random().save(folder)


def draft_model(folder: Path, model: Decoder) -> Drafter:
    """The base: what it drafts is right for greedy sequences of the base."""
    return DraftModel(load(folder, dtype=torch.bfloat16), model.traits.vocab_size, CPU)


def heads(folder: Path, model: Decoder) -> Drafter:
    """Heads that repeat the token that was sampled."""
    path = folder / "heads"
    path.mkdir()
    shapes = shapes_of(model.traits.hidden_size)
    tensors = {f"{i}.0.linear.{part}": torch.zeros(*shape) for i in range(3) for part, shape in shapes}
    save_file(tensors, path / medusa.WEIGHTS_NAME)
    (path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    found = medusa.read_heads(path, model, medusa.HeadKernels.of(CPU, torch.bfloat16, build()), RankGroup())
    assert found is not None
    return medusa.MedusaDrafter(found)


def mtp_layer(folder: Path, model: Decoder) -> Drafter:
    options = LoadOptions(folder, torch.bfloat16, CPU, BLOCK_TOKENS, drafts_with_mtp=True)
    return load_drafter(None, model, options, load_model, RankGroup())


@pytest.mark.parametrize(
    ("save_base", "make_drafter"), [(dense, draft_model), (dense, heads), (with_mtp_layer, mtp_layer)]
)
def test_drafts_of_models_and_heads_change_no_bit_of_sequences_with_adapters(
    save_base: Callable[[Path], Path],
    make_drafter: Callable[[Path, Decoder], Drafter],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(medusa, "_LEAST_LOGPROB", -70.0)
    monkeypatch.setattr("test_drafts.SAMPLINGS", [each for each in SAMPLINGS if each.grammar is None][::2])
    folder = save_base(tmp_path / "base")
    changed = {} if save_base is dense else {"target_modules": DENSE_PARTS}
    one, _ = make_adapter(tmp_path / "one", folder, 1, **changed)
    other, _ = make_adapter(tmp_path / "other", folder, 2, r=3, **changed)
    adapters = [Adapter(1, one), None, Adapter(2, other)]
    model = load(folder, dtype=torch.bfloat16, drafts_with_mtp=True)
    drafter = make_drafter(folder, model)
    engine = Engine(model, RankGroup(), CPU, BLOCK_TOKENS, drafter=drafter)
    engine.warm_up(WarmUpConfig(max_step_tokens=128, max_step_sequences=64, num_blocks=NUM_BLOCKS, proven=True))
    texts = prompts(3, [6 + 11 * i % 30 for i in range(6)], VOCAB)
    plain, _ = generate(engine, texts, 0, max_drafts=0, adapters=adapters)
    of_base, _ = generate(engine, texts, 0, max_drafts=0)
    assert [tokens == base for tokens, base in zip(plain, of_base, strict=True)] == [False, True, False] * 2
    draft, num_drafts = drafter.draft, []

    def counted(*args: Any) -> Any:
        drafts = draft(*args)
        num_drafts.append(sum(map(len, drafts)))
        return drafts

    monkeypatch.setattr(drafter, "draft", counted)
    assert generate(engine, texts, 0, max_drafts=6, adapters=adapters)[0] == plain
    assert sum(num_drafts) > len(texts)
