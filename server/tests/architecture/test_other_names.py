"""Checkpoints that transformers saved with the names of its modules, which differ from the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from model_driver import ModelDriver
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import make_model, save_case
from tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

# Some of the names that only such a checkpoint has.
CHANGED = {
    "jamba": "model.layers.1.feed_forward.experts.gate_up_proj",
    "lfm2-moe": "model.layers.1.feed_forward.experts.gate_up_proj",
    "olmo-hybrid": "model.layers.0.linear_attn.conv1d.weight",
    "qwen2-moe": "model.layers.0.mlp.experts.gate_up_proj",
    "qwen3-5-moe": "model.layers.0.mlp.experts.down_proj",
    "qwen3-next": "model.layers.0.mlp.experts.down_proj",
}


def logits(folder: Path) -> torch.Tensor:
    driver = ModelDriver(load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), RankGroup()), 16)
    (text,) = prompts(3, [20], VOCAB)
    return driver.step([(driver.sequence(text), len(text))], every_row=True)


@pytest.mark.parametrize("name", CHANGED)
def test_the_names_of_modules_are_known(name: str, tmp_path: Path) -> None:
    published, other = save_case(name, tmp_path / "published"), tmp_path / "other"
    make_model(name, CASES[name]).save_pretrained(other, save_original_format=False)
    with safe_open(other / "model.safetensors", "pt") as file:
        assert CHANGED[name] in file.keys()  # noqa: SIM118 - not iterable
    assert torch.equal(logits(other), logits(published))


def test_the_first_name_of_the_embedding_of_mamba_is_known(tmp_path: Path) -> None:
    expected = logits(save_case("mamba", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(tmp_path), expected)
