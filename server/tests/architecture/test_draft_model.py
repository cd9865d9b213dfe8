"""A draft model proposes tokens that change no bit, and reads only what it has not seen."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_quantized_models
import torch
from cases import VOCAB
from gguf_files import save_gguf
from penstock_server.engine import Engine
from penstock_server.engine.drafting import pooled
from penstock_server.engine.drafting.draft_model import DraftModel
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Sampling
from penstock_server.weights.gguf.folder import gguf_folder
from plans import Advance, listed, plan
from quantized_checkpoints import save_quantized
from test_drafts import BLOCK_TOKENS, NUM_BLOCKS, SAMPLINGS, generate
from tiny_model import save_case
from tiny_models import prompts

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

LIMITS = WarmUpConfig(max_step_tokens=512, max_step_sequences=256, num_blocks=NUM_BLOCKS, proven=True)
CPU = torch.device("cpu")


def load(folder: Path) -> CausalModel:
    return load_model(LoadOptions(folder, torch.bfloat16, CPU, BLOCK_TOKENS), RankGroup())


def ready(model: CausalModel, drafter: DraftModel | None = None, limits: WarmUpConfig = LIMITS) -> Engine:
    engine = Engine(model, RankGroup(), CPU, BLOCK_TOKENS, drafter=drafter)
    engine.warm_up(limits)
    return engine


class Counted(DraftModel):
    """Counts the tokens that the draft model computes."""

    num_tokens = 0

    def next(self, table: Any, rows: Any, starts: Any, counts: Any, outputs: Any) -> Any:
        self.num_tokens += int(counts.sum())
        return super().next(table, rows, starts, counts, outputs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_case("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_drafts_of_a_model_change_no_bit(name: str, llama: Path, tmp_path: Path) -> None:
    """The Llama drafts for itself, so drafts of greedy texts are right; and for others, where they are wrong."""
    samplings = [sampling for sampling in SAMPLINGS if sampling.grammar is None][::4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_drafts.SAMPLINGS", samplings)
        model = load(llama if name == "llama" else save_case(name, tmp_path))
        texts = prompts(3, [6 + 11 * i % 30 for i in range(len(samplings))], VOCAB)
        expected, num_plain_steps = generate(ready(model), texts, 0, max_drafts=0)
        drafted, num_steps = generate(
            ready(model, DraftModel(load(llama), model.traits.vocab_size, CPU)), texts, 0, max_drafts=6
        )
    assert drafted == expected
    assert num_steps <= num_plain_steps


@pytest.mark.parametrize("kind", ["Q4_0", "gptq"])
def test_drafts_change_no_bit_of_quantized_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantized model drafts for itself; where it samples, its drafts are wrong."""
    monkeypatch.setattr("test_drafts.SAMPLINGS", [Sampling(), Sampling(do_sample=True, seed=1, top_n=2)])
    reference = test_quantized_models.make_model("llama")
    if kind == "gptq":
        folder, _ = save_quantized(reference, tmp_path, *test_quantized_models.FORMATS[kind])
    else:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        folder = gguf_folder(save_gguf(reference, tmp_path / "model.gguf", "llama", kind))
    model, texts = load(folder), prompts(3, [17, 30], 131)
    expected, num_plain_steps = generate(ready(model), texts, 0, max_drafts=0)
    drafted, num_steps = generate(
        ready(model, DraftModel(load(folder), model.traits.vocab_size, CPU)), texts, 0, max_drafts=6
    )
    assert drafted == expected
    greedy = ready(model, DraftModel(load(folder), model.traits.vocab_size, CPU))
    (alone,), num_greedy_steps = generate(greedy, texts[:1], 0, max_drafts=6)
    assert alone == expected[0]
    assert num_steps <= num_plain_steps
    assert num_greedy_steps + 5 < num_plain_steps, "right drafts save steps"


class Steps:
    """Sends steps with one sequence each to an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.engine.reset()
        self.step = 0

    def __call__(self, advance: Advance, *new: NewSequence, freed: tuple[int, ...] = ()) -> list[int]:
        self.step += 1
        made = plan(self.step, new_sequences=list(new), advances=[advance], freed=list(freed))
        result = self.engine.step(made)
        assert not result.failures
        return [token.id for token in listed(result.sampled)]


def test_a_draft_model_computes_each_token_once_and_shared_or_returning_blocks_never_again(llama: Path) -> None:
    model = load(llama)
    drafter = Counted(load(llama), model.traits.vocab_size, CPU)
    step = Steps(ready(model, drafter))
    (text,) = prompts(5, [40], VOCAB)
    drafter.num_tokens = 0
    tokens = step(Advance(1, 40, range(6), True), NewSequence(1, text, 40))
    assert drafter.num_tokens == 0, "the plan allowed no drafts"
    tokens += step(Advance(1, 1, (), True, 3))
    assert len(tokens) == 5, "all drafts of the model itself are right"
    assert drafter.num_tokens == 41 + 2
    tokens += step(Advance(1, 1, (), True, 3))
    assert drafter.num_tokens == 43 + 2 + 2, "of three drafts and the token after them, it had computed two"
    # It returns with its blocks, and another one shares the first two.
    known = [*text, *tokens]
    tokens = step(
        Advance(1, len(known) - 32, range(2, 6), True, 3), NewSequence(1, known, 40, 32, range(2)), freed=(1,)
    )
    assert drafter.num_tokens == 47 + len(known) - 32 + 2
    other = [*text[:32], *text[:5]]
    step(Advance(2, 5, range(10, 14), True, 3), NewSequence(2, other, 37, 32, range(2)))
    assert drafter.num_tokens == 47 + len(known) - 32 + 2 + 5 + 2


def test_a_long_text_is_caught_up_on_in_several_steps(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "MAX_CATCH_UP_TOKENS", 30)
    model = load(llama)
    step = Steps(ready(model, DraftModel(load(llama), model.traits.vocab_size, CPU)))
    (text,) = prompts(5, [70], VOCAB)
    step(Advance(1, 70, range(7), True), NewSequence(1, text, 70))
    assert [len(step(Advance(1, 1, (), True, 3))) for _ in range(3)] == [1, 1, 4]


def test_both_pools_are_counted_and_a_longer_text_than_the_draft_model_s_has_no_drafts(llama: Path) -> None:
    model, drafting = load(llama), load(llama)
    drafting.spec = replace(drafting.spec, max_position_tokens=41)
    step = Steps(
        ready(model, DraftModel(drafting, model.traits.vocab_size, CPU), replace(LIMITS, proven=False, num_blocks=64))
    )
    assert len(drafting.caches) == drafting.traits.num_layers
    (text,) = prompts(5, [38], VOCAB)
    step(Advance(1, 38, range(6), True), NewSequence(1, text, 38))
    assert [len(step(Advance(1, 1, (), True, 4))) for _ in range(2)] == [4, 1]


def write_tokenizer(folder: Path, tokens: dict[str, int], added: list[dict[str, Any]]) -> None:
    tokenizer = {"model": {"type": "BPE", "vocab": tokens, "merges": []}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_first_difference(llama: Path, tmp_path: Path) -> None:
    target, drafting = shutil.copytree(llama, tmp_path / "target"), shutil.copytree(llama, tmp_path / "drafting")
    model, options = load(llama), LoadOptions(target, torch.bfloat16, CPU, BLOCK_TOKENS)

    def loaded() -> Any:
        return load_drafter(drafting, model, options, load_model, RankGroup())

    write_tokenizer(target, {"a": 0, "b": 1}, [{"id": 2, "content": "<end>"}])
    write_tokenizer(drafting, {"a": 0, "c": 1}, [])
    with pytest.raises(ConfigError, match="2 of the model's 3 tokens differ; token 1 is 'b' in the model and 'c' in"):
        loaded()
    write_tokenizer(drafting, {"a": 0, "b": 1}, [])
    with pytest.raises(ConfigError, match="token 2 is '<end>' in the model and not in the vocabulary in the drafting"):
        loaded()
    write_tokenizer(drafting, {"a": 0, "b": 1}, [{"id": 2, "content": "<end>"}, {"id": 3, "content": "<more>"}])
    assert isinstance(loaded(), DraftModel)
