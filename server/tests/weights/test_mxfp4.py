"""gpt-oss as it is published, with experts in MXFP4: the model of transformers with the weights as it dequantizes
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from gguf_files import logits_of
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.inspection.layout import lay_out
from penstock_server.inspection.reference import find_model
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.block import MXFP4
from rank_threads import run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import prompts
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

EXPERTS = "model.layers.0.mlp.experts"
VALUES = [number / 2 for number in MXFP4]


def make_model(num_experts: int) -> transformers.PreTrainedModel:
    config = transformers.GptOssConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attn_implementation="eager",
    )
    torch.manual_seed(num_experts)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, in_features, out_features] → blocks, scales: the nearest values, with the greatest of 32 at 4 or 6."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().int() - 2
    distances = torch.ldexp(groups, -exponents[..., None])[..., None] - torch.tensor(VALUES)
    codes = distances.abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Saves the model as gpt-oss is published, and gives it the weights that transformers reads there."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("_proj") or "experts" not in name:
            stored[name] = tensor.clone()
            continue
        blocks, scales = packed(tensor)
        stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=[4, 2])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder of a checkpoint, and the logits of transformers."""
    model = make_model(request.param)
    folder = save(model, tmp_path_factory.mktemp("mxfp4"))
    with torch.inference_mode():
        return folder, model(torch.tensor(prompts(1, [23], 131))).logits[0]


def test_the_values_are_those_of_transformers() -> None:
    assert VALUES == FP4_VALUES


def test_a_published_checkpoint_is_the_model_of_transformers(saved: tuple[Path, torch.Tensor]) -> None:
    folder, expected = saved
    torch.testing.assert_close(logits_of(folder, prompts(1, [23], 131)[0]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_ranks_hold_whole_experts_or_parts_of_them(exact: bool, saved: tuple[Path, torch.Tensor]) -> None:
    """Three ranks share four experts, and cut two."""
    folder, expected = saved

    def of_rank(group: RankGroup) -> tuple[torch.Tensor | None, int]:
        model = load_model(
            LoadOptions(folder, torch.float32, torch.device("cpu"), 16, activation_bits=16), group, exact
        )
        driver = ModelDriver(model, 16, num_blocks=2)
        return driver.step([(driver.sequence(prompts(1, [23], 131)[0]), 23)], every_row=True), model.weight_bytes

    ranks = run_ranks(3, of_rank)
    assert ranks[0][0] is not None
    torch.testing.assert_close(ranks[0][0], expected, atol=1e-4, rtol=1e-4)
    files = find_model(str(folder))
    layout = lay_out(files, folder, 3, "float32", memory_fraction=0.9)
    assert layout is not None
    if exact:
        assert [rank.weight_bytes for rank in layout.ranks] == [num_bytes for _, num_bytes in ranks]
    assert not [problem for problem in files.problems if "tensor" in problem]


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        (f"{EXPERTS}.down_proj_scales", None, f"it has {EXPERTS}.down_proj_blocks, but not {EXPERTS}.down_proj_scales"),
        (f"{EXPERTS}.gate_up_proj_scales", slice(0, 1), r"has shape \[1, 192, 2\], its weight implies \[4, 192, 2\]"),
        (f"{EXPERTS}.gate_up_proj_blocks", 0, r"gate_up_proj_blocks has shape \[192, 2, 16\], must have four"),
        (f"{EXPERTS}.gate_up_proj_scales", 255, rf"tensor {EXPERTS}.gate_up_proj.0 holds NaN"),
    ],
)
def test_damaged_experts_are_refused(tensor: str, change: slice | int | None, message: str, tmp_path: Path) -> None:
    folder = save(make_model(4), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    if change is None:
        del tensors[tensor]
    elif change == 255:
        tensors[tensor].fill_(255)
    else:
        tensors[tensor] = tensors[tensor][change].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        logits_of(folder, [1])
