"""Checkpoints with token tables that config.json does not expect: a head of their own although it is tied, copies, and
an embedding that is stored under the head's name only. Compared with what transformers makes of the same folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from cases import CASES, VOCAB, Case
from image_cases import VOCAB as IMAGE_VOCAB
from image_cases import make_image_model
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from pipeline_ranks import Recorder, loaded_engine, options_of, run_script, run_stages
from quantized_checkpoints import gptq, save_quantized
from rank_threads import run_native_ranks
from safetensors.torch import load_file, save_file
from tested_device import DEVICE
from tiny_model import make_model, save_case, save_model
from tiny_models import prompts
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, Tensor]
# case → the names of embedding and head in its checkpoint
TABLES = {
    "llama-nine-heads": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma2": ("model.embed_tokens.weight", "lm_head.weight"),
    "cohere": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "gpt-neox-sequential": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "gpt-neo": ("transformer.wte.weight", "lm_head.weight"),
    "bloom": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "falcon-40b": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "mpt": ("transformer.wte.weight", "lm_head.weight"),
    "opt-350m": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "t5": ("shared.weight", "lm_head.weight"),
    "umt5": ("shared.weight", "lm_head.weight"),
    "bart": ("model.shared.weight", "lm_head.weight"),
    "m2m-100": ("model.shared.weight", "lm_head.weight"),
    # Untied by default, and with a bias.
    "gptj": ("transformer.wte.weight", "lm_head.weight"),
}
COPIES = {
    "t5": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    "bart": ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
}


def rewrite(folder: Path, change: Callable[[Tensors], object], tied: bool | None = True) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if tied is not None:
        config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def another(table: Tensor) -> Tensor:
    return torch.randn(table.shape, generator=torch.Generator().manual_seed(1)) * 0.3


def load(folder: Path, group: RankGroup | None = None) -> Decoder:
    model = load_model(LoadOptions(folder, torch.float32, DEVICE, 16, activation_bits=16), group or RankGroup())
    assert isinstance(model, Decoder)
    return model


def logits(name: str, model: Decoder) -> Tensor:
    (text,) = prompts(3, [CASES[name].shortest + 4], VOCAB)
    driver = ModelDriver(model, block_tokens=16)
    return driver.step([(driver.sequence(text, CASES[name].num_source(text)), len(text))], every_row=True)


@torch.inference_mode()
def expected_logits(name: str, folder: Path) -> Tensor:
    case = CASES[name]
    auto = transformers.AutoModelForSeq2SeqLM if case.has_encoder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    (text,) = prompts(3, [case.shortest + 4], VOCAB)
    if not (num_source := case.num_source(text)):
        return model(torch.tensor([text]), use_cache=False).logits[0]
    source, answer = torch.tensor([text[:num_source]]), torch.tensor([text[num_source:]])
    return model(source, decoder_input_ids=answer, use_cache=False).logits[0]


@pytest.mark.parametrize("name", TABLES)
def test_a_stored_head_that_differs_is_used_although_the_config_ties_it(name: str, tmp_path: Path) -> None:
    embedding, head = TABLES[name]
    folder = rewrite(save_case(name, tmp_path), lambda tensors: tensors.update({head: another(tensors[embedding])}))
    torch.testing.assert_close(logits(name, load(folder)), expected_logits(name, folder), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-nine-heads", "gpt-neox-sequential", "t5", "bart"])
def test_an_equal_head_shares_the_memory_of_the_embedding(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedding, head = TABLES[name]
    folder = save_case(name, tmp_path)
    num_bytes = load(folder).weight_bytes
    copies = (head, *COPIES.get(name, ()))
    rewrite(folder, lambda tensors: tensors.update({copy: tensors[embedding].clone() for copy in copies}))
    model = load(folder)
    assert model.spec.head.tied
    assert model.weight_bytes == num_bytes
    assert "head" not in caplog.text
    torch.testing.assert_close(logits(name, model), expected_logits(name, folder), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-nine-heads", "gpt2", "t5", "bart"])
def test_a_table_that_is_stored_under_another_name_is_the_embedding(name: str, tmp_path: Path) -> None:
    embedding, head = TABLES[name]
    folder = save_case(name, tmp_path)
    table = load_file(folder / "model.safetensors")[embedding]
    expected = logits(name, load(folder))
    others = (head, *COPIES.get(name, ()))
    for other in others:

        def move(tensors: Tensors, name: str = other) -> None:
            for each in (embedding, *others):
                tensors.pop(each, None)
            tensors[name] = table

        rewrite(folder, move)
        assert torch.equal(logits(name, load(folder)), expected)
        torch.testing.assert_close(expected, expected_logits(name, folder), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gptj", "codegen", "phi", "phimoe"])
def test_a_tied_head_may_have_a_bias(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], values={**CASES[name].values, "tie_word_embeddings": True})
    folder = save_model(make_model(name, case), tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    expected, model = expected_logits(name, folder), load(folder)
    assert model.spec.head.tied
    torch.testing.assert_close(logits(name, model), expected, atol=1e-4, rtol=1e-4)
    if DEVICE.type == "cpu":
        for found in run_native_ranks(2, lambda group: logits(name, load(folder, group))):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", COPIES)
def test_different_tables_of_encoder_and_decoder_are_refused(name: str, tmp_path: Path) -> None:
    copy = COPIES[name][0]
    folder = rewrite(save_case(name, tmp_path), lambda tensors: tensors.update({copy: another(torch.empty(VOCAB, 48))}))
    with pytest.raises(ConfigError, match=f"^the checkpoint's {copy} differs from .*must share one token table"):
        load(folder)


def test_the_log_says_that_the_head_is_the_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedding, head = TABLES["gpt2"]
    load(rewrite(save_case("gpt2", tmp_path), lambda tensors: tensors.update({head: another(tensors[embedding])})))
    assert [(each.levelno, each.message) for each in caplog.records if "head" in each.message] == [
        (
            logging.WARNING,
            "config.json ties the output head to the embedding, but the checkpoint's lm_head.weight differs and "
            "is used",
        )
    ]


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    head = torch.zeros(VOCAB + 1, 72)
    folder = rewrite(save_case("llama-nine-heads", tmp_path), lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(ConfigError, match=r"tensor lm_head.weight has shape \[132, 72\] in the checkpoint"):
        load(folder)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = rewrite(save_case("llama", tmp_path), lambda tensors: tensors.pop("lm_head.weight"), tied=None)
    with pytest.raises(ConfigError, match=r"^the checkpoint lacks the output head, lm_head.weight, and .*does not tie"):
        load(folder)
    rewrite(folder, lambda _: None, tied=True)
    assert load(folder).spec.head.tied


def test_gpt_neox_may_call_its_head_as_transformers_5_does(tmp_path: Path) -> None:
    folder = save_case("gpt-neox", tmp_path)
    expected = logits("gpt-neox", load(folder))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("embed_out.weight")}), tied=None)
    assert torch.equal(logits("gpt-neox", load(folder)), expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="threads are ranks on a CPU only")
def test_ranks_and_stages_hold_their_parts_of_the_head(tmp_path: Path) -> None:
    name = "llama-nine-heads"
    embedding, head = TABLES[name]
    folder = rewrite(save_case(name, tmp_path), lambda tensors: tensors.update({head: another(tensors[embedding])}))
    expected = logits(name, load(folder))
    for found in run_native_ranks(2, lambda group: logits(name, load(folder, group))):
        assert torch.equal(found, expected)
    plans = Recorder(loaded_engine(options_of(folder, torch.float32), RankGroup()))
    script = run_script(plans, VOCAB, num_rounds=1)
    found_by_stages, engines = run_stages(options_of(folder, torch.float32), 2, 1, plans.plans)
    assert found_by_stages == script
    tables = [engine.model.embedding is not None for engine in engines]  # type: ignore[attr-defined]
    assert tables == [False, True], "the last stage holds the head only"


@pytest.mark.parametrize("name", ["smolvlm-tied", "gemma3", "qwen2-vl", "llava"])
def test_a_model_that_reads_images_may_have_a_head_of_its_own(name: str, tmp_path: Path) -> None:
    make_image_model(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (embedding,) = [each for each in stored if each.endswith("embed_tokens.weight")]
    head = next((each for each in stored if each.endswith("lm_head.weight")), "lm_head.weight")
    rewrite(tmp_path, lambda tensors: tensors.update({head: another(tensors[embedding])}))
    model = load(tmp_path)
    reference = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (text,) = prompts(3, [9], IMAGE_VOCAB)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    driver = ModelDriver(model, block_tokens=16)
    found = driver.step([(driver.sequence(text), len(text))], every_row=True)
    assert not model.spec.head.tied
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_quantized_head", [False, True])
def test_a_quantized_model_may_have_a_head_of_its_own(has_quantized_head: bool, tmp_path: Path) -> None:
    """Beside a dense embedding."""
    name = "llama"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    case = replace(CASES[name], values={**sizes, "tie_word_embeddings": True, "vocab_size": 160})
    options = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    options |= {"lm_head": True} if has_quantized_head else {}
    quantize = gptq(4, 32, symmetric=True)
    folder, dense = save_quantized(make_model(name, case), tmp_path, options, quantize)
    head = another(torch.empty(160, 64))
    stored, exact = quantize("lm_head", head) if has_quantized_head else ({"lm_head.weight": head}, head)
    rewrite(folder, lambda tensors: tensors.update({key: each.contiguous() for key, each in stored.items()}))
    rewrite(dense, lambda tensors: tensors.update({"lm_head.weight": exact}))
    torch.testing.assert_close(logits(name, load(folder)), expected_logits(name, dense), atol=1e-3, rtol=1e-3)


def test_a_model_of_transformers_may_have_a_head_of_its_own(tmp_path: Path) -> None:
    case = Case("VaultGemmaConfig", {"head_dim": 16, "tie_word_embeddings": True})
    folder = save_model(make_model("vaultgemma", case), tmp_path)
    rewrite(folder, lambda each: each.update({"lm_head.weight": another(each["model.embed_tokens.weight"])}))
    with torch.inference_mode():
        model = load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), RankGroup())
    driver = ModelDriver(model, block_tokens=16, device=torch.device("cpu"))
    (text,) = prompts(3, [9], VOCAB)
    found = driver.step([(driver.sequence(text), len(text))], every_row=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([text]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
