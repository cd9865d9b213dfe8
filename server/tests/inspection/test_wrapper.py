"""Names that wrappers of training leave in a checkpoint are removed where they are unambiguous."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.models import load_model
from penstock_server.models.fallback import load_fallback
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.wrapper import renamings, unwrapped
from safetensors.torch import load_file, save_file
from tiny_models import make_model, prompts, save_model

FILE = "model.safetensors"
CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.up_proj.weight"
WRAPPED = {
    "torch.compile": "_orig_mod.{}",
    "data parallel": "module.{}",
    "both": "module._orig_mod.{}",
    "both, the other way round": "_orig_mod.module.{}",
    "merged peft": "base_model.model.{}",
    "merged peft, trained in parallel": "module.base_model.model.{}",
}


def in_the_middle(name: str) -> str:
    """As FSDP, and torch.compile of the trunk and of each layer, name the tensors."""
    name = re.sub(r"^model\.", "model._orig_mod.", name)
    return re.sub(r"layers\.(\d+)\.", r"layers.\1._fsdp_wrapped_module._checkpoint_wrapped_module.", name)


def rename(folder: Path, form: str) -> None:
    tensors = load_file(folder / FILE)
    rename = in_the_middle if form == "middle" else WRAPPED[form].format
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})


def logits(model: CausalModel) -> torch.Tensor:
    driver = ModelDriver(model, block_tokens=16, device=CPU)
    (text,) = prompts(3, [9], 131)
    return driver.step([(driver.sequence(text), len(text))], every_row=True)


def load(folder: Path, *, past_ours: bool = False) -> CausalModel:
    options = LoadOptions(folder, torch.float32, CPU, 16)
    with torch.inference_mode():
        return load_fallback(options, RankGroup()) if past_ours else load_model(options, RankGroup())


@pytest.mark.parametrize("form", [*WRAPPED, "middle"])
@pytest.mark.parametrize("past_ours", [False, True])
def test_a_wrapped_checkpoint_gives_the_values_of_the_model(
    form: str, past_ours: bool, tmp_path: Path, capsys: Any
) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    expected = logits(load(folder, past_ours=past_ours))
    rename(folder, form)
    assert torch.equal(logits(load(folder, past_ours=past_ours)), expected)
    check.main([str(folder), "--json"])
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note for note in notes if note.startswith("tensor names are those of a wrapped model: ")]


def test_the_index_of_a_wrapped_checkpoint_has_the_stored_names(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path, "60KB")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    expected = logits(load(folder))
    for path in folder.glob("*.safetensors"):
        save_file({f"module.{name}": tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    weight_map = {f"module.{name}": file for name, file in values["weight_map"].items()}
    index.write_text(json.dumps({**values, "weight_map": weight_map}))
    assert torch.equal(logits(load(folder)), expected)


def test_only_unambiguous_names_are_removed() -> None:
    plain = [LAYER, "lm_head.weight"]
    assert unwrapped(plain) == dict(zip(plain, plain, strict=True))
    assert renamings(plain) == {}
    partly = ["module.x.weight", "y.weight"]
    assert list(unwrapped(partly).values()) == partly
    inside = ["a.module.x", "my_orig_mod.y", "x._orig_mod"]
    assert list(unwrapped(inside).values()) == inside
    adapter = [f"base_model.model.{LAYER.removesuffix('weight')}lora_{part}.weight" for part in "AB"]
    assert list(unwrapped(adapter).values()) == adapter
    assert unwrapped([]) == {}


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the checkpoint holds x twice, as _orig_mod.x and as x$"):
        unwrapped(["_orig_mod.x", "x"])


def test_an_unmerged_adapter_is_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    tensors = load_file(folder / FILE)
    tensors["model.layers.0.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 48)
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, folder / FILE)
    with pytest.raises(ConfigError, match="the checkpoint lacks 30 of 30 tensors"):
        load(folder)
