"""Integers that a tool wrote as floats, in config.json and in the objects inside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB, Case
from image_cases import make_image_model
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.models.support import FALLBACK, support_of
from penstock_server.parallel import RankGroup
from quantized_checkpoints import gptq, save_quantized
from tiny_model import make_model, save_case, save_model
from tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def as_floats(value: Any) -> Any:
    """Every integer as a float."""
    if isinstance(value, dict):
        return {key: as_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_floats(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def rewrite(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    values: dict[str, Any] = as_floats(json.loads(path.read_text()))
    path.write_text(json.dumps(values))
    return values


def load(folder: Path) -> CausalModel:
    with torch.inference_mode():
        return load_model(LoadOptions(folder, torch.float32, CPU, 16), RankGroup())


def logits(model: CausalModel, num_source: int = 0) -> torch.Tensor:
    driver = ModelDriver(model, block_tokens=16, device=CPU)
    (text,) = prompts(3, [16], VOCAB)
    return driver.step([(driver.sequence(text, num_source), len(text))], every_row=True)


def test_booleans_may_be_zero_or_one(tmp_path: Path) -> None:
    folder = save_case("t5", tmp_path)
    expected, path = logits(load(folder), 5), folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "tie_word_embeddings": int(values["tie_word_embeddings"])}))
    assert torch.equal(logits(load(folder), 5), expected)


def test_heads_without_elements_are_refused(tmp_path: Path) -> None:
    folder = save_case("llama3-rope", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "head_dim": 0}))
    with pytest.raises(ConfigError, match="head_dim must be at least 1, not 0"):
        load(folder)


@pytest.mark.parametrize("name", ["llama3-rope", "dbrx", "llama4", "gemma3", "gpt2", "t5", "mllama-text", "exaone"])
def test_a_model_with_floats_for_integers_is_the_same(name: str, tmp_path: Path) -> None:
    folder, num_source = save_case(name, tmp_path), 5 if CASES[name].has_encoder else 0
    expected = logits(load(folder), num_source)
    rewrite(folder)
    assert torch.equal(logits(load(folder), num_source), expected)


@pytest.mark.parametrize("name", ["smolvlm-tied", "qwen2-vl"])
def test_a_model_that_reads_images_may_have_them_in_each_part(name: str, tmp_path: Path) -> None:
    make_image_model(name, tmp_path)
    expected = logits(load(tmp_path))
    rewrite(tmp_path)
    assert torch.equal(logits(load(tmp_path)), expected)


def test_a_model_of_transformers_may_have_them(tmp_path: Path) -> None:
    folder = save_model(make_model("vaultgemma", Case("VaultGemmaConfig", {"head_dim": 16})), tmp_path)
    expected = logits(load(folder))
    values = rewrite(folder)
    assert support_of("vaultgemma", values) == FALLBACK
    assert torch.equal(logits(load(folder)), expected)


def test_a_quantized_model_may_have_them_in_its_options(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    model = make_model("llama", Case("LlamaConfig", sizes))
    options = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    folder, _ = save_quantized(model, tmp_path, options, gptq(4, 32, symmetric=True))
    expected = logits(load(folder))
    rewrite(folder)
    assert torch.equal(logits(load(folder)), expected)


def test_end_tokens_are_described(tmp_path: Path, capsys: Any) -> None:
    folder = save_case("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2.0, 7.0]}')
    check.main([str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["text"]["eos_token_ids"] == [2, 7]


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 48.5), ("num_hidden_layers", 1e-3), ("vocab_size", True)])
def test_other_floats_are_refused_by_name(key: str, value: float, tmp_path: Path) -> None:
    folder = save_case("llama", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=f"{key} must be of type int, not {value}"):
        load(folder)
