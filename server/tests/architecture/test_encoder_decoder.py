"""Models with an encoder: generation against transformers, what the router learns about them, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, VOCAB
from engine_run import EngineRun
from model_driver import ModelDriver
from penstock_server.device.attention.interface import AttentionMask, AttentionShape, window_tokens
from penstock_server.device.reference.attention import ReferenceAttention
from penstock_server.engine import Engine
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import read_spec
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Sampling
from plans import Advance, plan, step
from test_parity import reference_logits
from tiny_model import make_model, save_model
from tiny_models import prompts
from transformers.models.t5.modeling_t5 import T5Attention

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NUM_TOKENS = 64
NEVER_ENDS: dict[str, Any] = {"eos_token_id": VOCAB + 1, "forced_eos_token_id": None, "pad_token_id": 0}


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "start", "forced", "penalty"),
    [("t5", 0, None, 1.0), ("mt5", 3, None, 1.3), ("bart", 2, 7, 1.3), ("mbart", 9, 8, 1.0)],
)
def test_answers_are_those_of_generate(
    name: str, start: int, forced: int | None, penalty: float, tmp_path: Path
) -> None:
    """Three sources of different lengths, in common steps and with a preemption. The repetition penalty counts the
    answer's tokens only."""
    model = make_model(name, CASES[name])
    folder = save_model(model, tmp_path)
    edit(folder / "generation_config.json", decoder_start_token_id=start, forced_bos_token_id=forced)
    run = EngineRun(folder, num_source=lambda prompt: len(prompt) - len(prefix))
    prefix = list(run.engine.model.traits.decoder_prefix)
    assert prefix == [start, *([] if forced is None else [forced])]
    sources = prompts(6, [9, 12, 5], VOCAB)
    run.sampling = Sampling(repetition_penalty=penalty)
    found = run.greedy([[*source, *prefix] for source in sources], NUM_TOKENS, shared_tokens=0, chunk=7)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=start, forced_bos_token_id=forced, repetition_penalty=penalty, **NEVER_ENDS
    )
    for source, tokens in zip(sources, found, strict=True):
        expected = model.generate(
            torch.tensor([source]), max_new_tokens=NUM_TOKENS + len(prefix) - 1, do_sample=False, num_beams=1
        )
        assert [*prefix, *tokens] == expected[0].tolist()


def test_the_router_learns_source_limits_and_decoder_prefixes(tmp_path: Path) -> None:
    told = {}
    for name in ("t5", "bart", "qwen3"):
        folder = save_model(make_model(name, CASES[name]), tmp_path / name)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}}}))
        engine, description = Engine.load(LoadConfig(folder, 4, dtype="float32", num_threads=1), load_model=load_model)
        engine.close()
        told[name] = (description.max_position_tokens, description.max_source_tokens, description.decoder_prefix)
    assert told == {"t5": (16384, 8192, (0,)), "bart": (256, 128, (2,)), "qwen3": (256, 0, ())}


def test_generation_config_takes_precedence_for_the_decoder_prefix(tmp_path: Path) -> None:
    folder = save_model(make_model("bart", CASES["bart"]), tmp_path)

    def prefix() -> tuple[int, ...]:
        encoder = read_spec(folder)[0].encoder
        assert encoder is not None
        return encoder.decoder_prefix

    edit(folder / "config.json", decoder_start_token_id=11, forced_bos_token_id=12)
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 5}')
    assert prefix() == (5,)
    (folder / "generation_config.json").unlink()
    assert prefix() == (11, 12)
    edit(folder / "config.json", forced_bos_token_id=VOCAB)
    with pytest.raises(ConfigError, match=r"decoder start tokens \(11, 131\) are outside of the vocabulary of 131"):
        prefix()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bart", {"encoder_attention_heads": 3}, "encoder_attention_heads is 3, decoder_attention_heads 6"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings must be true"),
        ("t5", {"feed_forward_proj": "half-gelu"}, "feed_forward_proj must be"),
        ("t5", {"feed_forward_proj": "gated-maxout"}, "feed_forward_proj 'maxout' is not supported"),
        ("t5", {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets is 3"),
    ],
)
def test_unsupported_options_are_refused(name: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_model(make_model(name, CASES[name]), tmp_path)
    edit(folder / "config.json", **values)
    with pytest.raises(ConfigError, match=message):
        read_spec(folder)


def test_a_broken_source_fails_its_sequence_only(tmp_path: Path) -> None:
    run = EngineRun(save_model(make_model("t5", CASES["t5"]), tmp_path), num_source=lambda prompt: 6)
    whole = NewSequence(1, [9] * 8, 8, 0, [0, 1], num_source_tokens=6)
    alone = step(run.engine, plan(1, new_sequences=[whole], advances=[Advance(1, 8, sample=True)]))
    mixed = plan(
        2,
        freed=[1],
        new_sequences=[replace(whole, sequence_id=2, num_source_tokens=0), whole, replace(whole, sequence_id=3)],
        advances=[Advance(2, 8, sample=True), Advance(1, 8, sample=True), Advance(3, 3)],
    )
    outputs = step(run.engine, mixed)
    assert [bool(output.error) for output in outputs] == [True, False, True]
    assert outputs[1].tokens[0].id == alone[0].tokens[0].id


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_check_reports_the_memory_that_loading_takes(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_source in (("t5-v1.1", 8192), ("bart", 128)):
        folder = save_model(make_model(name, CASES[name]), tmp_path / name)
        check.main([str(folder), "--json", "--dtype", dtype])
        report = json.loads(capsys.readouterr().out)
        assert [problem for problem in report["problems"] if "tokenizer" not in problem] == []
        assert report["layout"]["max_source_tokens"] == num_source
        rank = report["layout"]["ranks"][0]
        # Native attention pads these heads.
        model = load_model(LoadOptions(folder, getattr(torch, dtype), CPU, 16, attention="reference"), RankGroup())
        assert rank["weight_bytes"] == model.weight_bytes
        assert rank["kv_bytes_per_token"] * 16 == model.kv_bytes_per_block


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_sums_beyond_float16_do_not_break_t5(name: str, tmp_path: Path) -> None:
    """The output of its MLPs exceeds the range of float16; transformers keeps their last matrix in float32, too."""
    model = make_model(name, CASES[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("wo.weight"):
                parameter.mul_(1e5)
    folder = save_model(model, tmp_path)
    text = prompts(7, [20], VOCAB)[0]
    wide = reference_logits(type(model).from_pretrained(folder).eval(), text, 9)[9:]
    driver = ModelDriver(load_model(LoadOptions(folder, torch.float16, CPU, 4), RankGroup()))
    logits = driver.step([(driver.sequence(text, 9), 20)], every_row=True)
    assert logits.dtype == torch.float16
    assert (logits.float() - wide).norm() < 2e-2 * wide.norm()


def test_the_warm_up_runs_sources(tmp_path: Path) -> None:
    folder = save_model(make_model("mbart", CASES["mbart"]), tmp_path)
    model = load_model(LoadOptions(folder, torch.float32, CPU, 4), RankGroup())
    engine = Engine(model, RankGroup(), CPU, 4)
    capacity = engine.warm_up(WarmUpConfig(40, 4, max_sequence_tokens=0, num_blocks=200))
    assert "worst sources" in [phase.name for phase in capacity.phases]


@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_distances_fall_into_the_buckets_of_transformers(is_bidirectional: bool) -> None:
    for num_buckets, max_distance in ((32, 128), (12, 24), (6, 50), (64, 1000)):
        spec = RelativeBiasSpec("bias", num_buckets, max_distance, is_bidirectional)
        distances = torch.arange(-max_distance, max_distance + 1)
        theirs = T5Attention._relative_position_bucket(distances, is_bidirectional, num_buckets, max_distance)
        assert torch.equal(spec._buckets(distances), theirs)
        farther = torch.tensor([-100 * max_distance, 100 * max_distance])
        theirs = T5Attention._relative_position_bucket(farther, is_bidirectional, num_buckets, max_distance)
        assert torch.equal(spec._buckets(distances[[0, -1]]), theirs), "distances beyond the last are clamped to it"


def test_the_window_of_a_model_is_that_of_its_widest_layer() -> None:
    def attention(mask: AttentionMask) -> ReferenceAttention:
        return ReferenceAttention(AttentionShape(1, 1, 8, 1.0, 4, mask=mask), CPU, torch.float32)

    narrow, wide, chunks = (
        attention(AttentionMask(window=5)),
        attention(AttentionMask(window=9)),
        attention(AttentionMask(chunk=7)),
    )
    assert window_tokens([narrow, wide]) == 9
    assert window_tokens([narrow, chunks]) == 7
    assert window_tokens([narrow, attention(AttentionMask())]) == 0
    assert window_tokens([narrow, attention(AttentionMask(part="source"))]) == 0


@pytest.mark.parametrize(("name", "window"), [("mistral", 16), ("mistral-no-window", 0), ("gemma3", 0), ("t5", 0)])
def test_models_report_their_window(name: str, window: int, tmp_path: Path) -> None:
    folder = save_model(make_model(name, CASES[name]), tmp_path)
    assert load_model(LoadOptions(folder, torch.float32, CPU, 4), RankGroup()).traits.window_tokens == window
