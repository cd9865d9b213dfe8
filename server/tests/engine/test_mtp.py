"""Multi-token prediction layers: what they draft is what the published computation drafts, and it changes no bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoint import DEEPSEEK_V3, GLM4_MOE, NUM_LAYERS, QWEN3_5, SIZES, Reference
from penstock_server.engine import Engine
from penstock_server.engine.drafting.head import HeadDrafter
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.engine.drafting.mtp import MtpHead
from penstock_server.engine.drafting.ngram import NgramDrafter
from penstock_server.engine.offload import Offload
from penstock_server.engine.pool_blocks import pool_blocks
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Plan, Transfer, TransferKind
from plans import Advance, listed, plan
from quantized_checkpoints import float8, save_quantized
from rank_threads import run_native_ranks
from safetensors.torch import load_file, save_file
from test_eagle import Recorded, generate
from tiny_models import prompts

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

CPU, BLOCK_TOKENS, VOCAB = torch.device("cpu"), 16, SIZES["vocab_size"]
LIMITS = WarmUpConfig(max_step_tokens=64, max_step_sequences=16, num_blocks=60, num_state_slots=16, proven=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.random()


@pytest.fixture(scope="module")
def folder(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[DEEPSEEK_V3, GLM4_MOE, QWEN3_5], ids=["deepseek", "glm", "qwen"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    """A model of each family, and its folder."""
    made = Reference.random(request.param)
    return made, made.save(tmp_path_factory.mktemp("published"))


def options_of(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadOptions:
    return LoadOptions(folder, dtype, CPU, BLOCK_TOKENS, drafts_with_mtp=True, **options)


def load(options: LoadOptions, group: RankGroup | None = None) -> tuple[Decoder, HeadDrafter]:
    group = group or RankGroup()
    model = load_model(options, group)
    drafter = load_drafter(None, model, options, load_model, group)
    assert isinstance(model, Decoder)
    assert isinstance(drafter, HeadDrafter)
    return model, drafter


def drafting(options: LoadOptions) -> tuple[Engine, Recorded]:
    model, drafter = load(options)
    recorded = Recorded(drafter.model, CPU)
    engine = Engine(model, RankGroup(), CPU, BLOCK_TOKENS, drafter=recorded)
    engine.warm_up(LIMITS)
    recorded.drafts.clear()
    return engine, recorded


def plain(options: LoadOptions) -> Engine:
    model = load_model(replace(options, drafts_with_mtp=False), RankGroup())
    engine = Engine(model, RankGroup(), CPU, BLOCK_TOKENS)
    engine.warm_up(LIMITS)
    return engine


def test_drafts_are_those_of_the_published_computation_and_change_no_bit(published: tuple[Reference, Path]) -> None:
    reference, folder = published
    engine, drafter = drafting(options_of(folder))
    texts = prompts(4, [5, 9, 17], VOCAB)
    expected, _ = generate(plain(options_of(folder)), texts, 12, num_drafts=0)
    drafted, _ = generate(engine, texts, 12, num_drafts=3)
    assert drafted == expected
    assert len(drafter.drafts) > 20
    for text, draft in drafter.drafts:
        assert draft == reference.draft(text, len(draft))[0]


def test_logits_of_drafts_are_those_of_the_published_computation(
    reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, drafter = drafting(options_of(folder))
    logits: list[torch.Tensor] = []
    compute = MtpHead.forward

    def forward(self: MtpHead, *args: Any) -> Any:
        drafted = compute(self, *args)
        logits.extend(self._model.logits(drafted.outputs))
        return drafted

    monkeypatch.setattr(MtpHead, "forward", forward)
    generate(engine, prompts(5, [20], VOCAB), 14, num_drafts=3)
    expected = torch.cat([reference.draft(text, len(draft))[1] for text, draft in drafter.drafts])
    torch.testing.assert_close(torch.stack(logits), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_change_no_bit_on_two_ranks(published: tuple[Reference, Path], dtype: torch.dtype) -> None:
    """Both ranks run the plans of one rank, whose results depend on the drafts."""
    _, folder = published
    engine, drafter = drafting(options_of(folder, dtype))
    texts = prompts(4, [5, 9, 17], VOCAB)
    plans: list[Plan] = []
    step = engine.step

    def recorded(made: Plan) -> Any:
        plans.append(made)
        return step(made)

    engine.step = recorded  # type: ignore[method-assign]
    expected, _ = generate(engine, texts, 12, num_drafts=3)
    assert expected == generate(plain(options_of(folder, dtype)), texts, 12, num_drafts=0)[0]

    def on_rank(group: RankGroup) -> list[list[Any]]:
        model, drafter = load(options_of(folder, dtype), group)
        engine = Engine(model, group, CPU, BLOCK_TOKENS, drafter=drafter)
        engine.warm_up(LIMITS)
        outputs: list[list[Any]] = [[] for _ in texts]
        for made in plans:
            result = engine.step(made)
            for sequence, token in zip(result.sequence_ids.tolist(), listed(result.sampled), strict=True):
                outputs[sequence].append(token)
        return outputs

    assert run_native_ranks(2, on_rank)[0] == expected
    assert any(len(draft) == 3 for _, draft in drafter.drafts)


def test_a_layer_that_knows_a_text_saves_steps(reference: Reference, folder: Path, tmp_path: Path) -> None:
    (prompt,) = prompts(4, [9], VOCAB)
    (expected,), num_plain_steps = generate(plain(options_of(folder)), [prompt], 24, num_drafts=0)
    text = [*prompt, *(token.id for token in expected)]
    reference.save_knowing(text, folder, tmp_path)
    (drafted,), num_steps = generate(drafting(options_of(tmp_path))[0], [prompt], 24, num_drafts=1)
    assert drafted == expected
    assert num_steps <= num_plain_steps - 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_in_fp8_blocks_draft_as_the_weights_that_they_stand_for(
    reference: Reference, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    stored, dense = save_quantized(reference.whole, tmp_path, made, float8("block"))
    texts = prompts(4, [5, 9, 17], VOCAB)
    drafts = []
    for path in (reference.complete(stored), reference.complete(dense)):
        # Elements of a block times its scale are rounded to bfloat16 where they stay in eight bits.
        options = options_of(path, dtype, dequantize=dtype == torch.float32)
        engine, drafter = drafting(options)
        drafted, _ = generate(engine, texts, 12, num_drafts=3)
        assert drafted == generate(plain(options), texts, 12, num_drafts=0)[0]
        drafts.append(drafter.drafts)
    assert dtype == torch.bfloat16 or drafts[0] == drafts[1]
    assert len(drafts[0]) > 20


def test_a_shared_or_returning_prefix_is_read_from_its_blocks(reference: Reference, folder: Path) -> None:
    engine, drafter = drafting(options_of(folder))
    engine.reset()
    (text,) = prompts(6, [36], VOCAB)
    counts: list[int] = []
    compute = drafter.next
    drafter.next = lambda *args: counts.append(int(args[3].sum())) or compute(*args)  # type: ignore[method-assign]

    def step(number: int, advance: Advance, *new: NewSequence, freed: tuple[int, ...] = ()) -> None:
        made = plan(number, new_sequences=list(new), advances=[advance], freed=list(freed))
        assert not engine.step(made).failures

    step(1, Advance(1, 36, range(4), True), NewSequence(1, text, 36))
    step(2, Advance(1, 1, (), True, 2))
    assert counts == [36, 1]
    # Another sequence shares two blocks, whose outputs the model does not compute again.
    other = [*text[:33], 7]
    step(3, Advance(2, 2, [8], True), NewSequence(2, other, 34, 32, range(2)), freed=(1,))
    step(4, Advance(2, 1, (), True, 2))
    assert counts == [36, 1, 2, 1]
    # Blocks that were moved out of the pool and into other ones bring what the model computed.
    caches = [*engine.model.caches, *drafter.model.caches]
    offload = Offload(pool_blocks(caches, len(caches[0]), torch.device("cpu")), 2)
    moves = [
        (TransferKind.STORE, 0, 0),
        (TransferKind.STORE, 1, 1),
        (TransferKind.LOAD, 0, 20),
        (TransferKind.LOAD, 1, 21),
    ]
    offload.move([Transfer(*move) for move in moves])
    step(5, Advance(3, 2, [22], True), NewSequence(3, [*text[:33], 8], 34, 32, [20, 21]), freed=(2,))
    step(6, Advance(3, 1, (), True, 2))
    assert counts == [36, 1, 2, 1, 34, 1]
    for known, draft in drafter.drafts:
        assert draft == reference.draft(known, len(draft))[0]


def test_a_checkpoint_without_the_layer_drafts_with_ngrams(reference: Reference, folder: Path, tmp_path: Path) -> None:
    prefix = f"model.layers.{NUM_LAYERS}."
    tensors = {name: part for name, part in load_file(folder / "model.safetensors").items() if prefix not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    options = options_of(tmp_path)
    model = load_model(options, RankGroup())
    drafter = load_drafter(None, model, options, load_model, RankGroup())
    assert isinstance(drafter, NgramDrafter)


def test_layers_behind_the_first_are_ignored_and_the_log_says_so(
    reference: Reference, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(folder / "model.safetensors")
    first, second = (f"model.layers.{NUM_LAYERS + index}." for index in range(2))
    others = {name.replace(first, second): torch.zeros_like(part) for name, part in tensors.items() if first in name}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    with caplog.at_level("INFO"):
        engine, drafter = drafting(options_of(tmp_path))
    assert caplog.text.count("1 further multi-token prediction layers are ignored") == 1
    generate(engine, prompts(4, [9], VOCAB), 8, num_drafts=3)
    assert drafter.drafts
    for text, draft in drafter.drafts:
        assert draft == reference.draft(text, len(draft))[0]


def test_a_layer_that_lacks_a_tensor_is_refused_if_it_drafts(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.{NUM_LAYERS}.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    load_model(replace(options_of(tmp_path), drafts_with_mtp=False), RankGroup())
    with pytest.raises(ConfigError, match=rf"lacks 1 of \d+ tensors: model\.layers\.{NUM_LAYERS}\.hnorm\.weight"):
        load_model(options_of(tmp_path), RankGroup())
