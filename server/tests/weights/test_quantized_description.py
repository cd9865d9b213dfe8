"""Checkpoints that config.json does not call quantized: the files of AutoGPTQ and AWQ describe them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.format import quantization_config
from quantized_checkpoints import awq, gemv, gptq, marlin, save_quantized
from test_quantized_checkpoints import SIZES, gptq_options, logits
from tiny_models import make_model

GPTQ, AWQ = "quantize_config.json", "quant_config.json"
# As AutoGPTQ writes it.
GPTQ_OPTIONS = {
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.01,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": None,
    "is_marlin_format": False,
    "quant_method": "gptq",
}
AWQ_OPTIONS = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
QUANTIZERS = {
    "gptq": gptq(4, 32, symmetric=True),
    "gptq in activation order": gptq(4, 32, symmetric=False, in_order=False),
    "gptq marlin": marlin(32, ("B", "s")),
    "awq": awq(32),
    "awq gemv": gemv(32, fast=False),
    "awq marlin": marlin(32, ("qweight", "scales")),
}
# A file's layout: the quantizer, the file, and its content.
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AutoGPTQ": ("gptq", GPTQ, GPTQ_OPTIONS),
    "the first AutoGPTQ": (
        "gptq in activation order",
        GPTQ,
        {
            "bits": 4,
            "group_size": 32,
            "damp_percent": 0.01,
            "desc_act": True,
            "sym": False,
            "true_sequential": True,
        },
    ),
    "AutoGPTQ for Marlin": ("gptq marlin", GPTQ, {**GPTQ_OPTIONS, "is_marlin_format": True}),
    "AutoAWQ": ("awq", AWQ, AWQ_OPTIONS),
    "AutoAWQ without a version": ("awq", AWQ, {"zero_point": True, "q_group_size": 32, "w_bit": 4}),
    "AutoAWQ for gemv": ("awq gemv", AWQ, {**AWQ_OPTIONS, "version": "GEMV"}),
    "AutoAWQ for Marlin": ("awq marlin", AWQ, {**AWQ_OPTIONS, "zero_point": False, "version": "Marlin"}),
    "AWQ under GPTQ's name": ("awq", GPTQ, {"bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}),
    "AWQ with its options under GPTQ's name": ("awq", GPTQ, AWQ_OPTIONS),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By quantizer: the quantized checkpoint, and the dense one."""
    model = make_model("qwen2", **SIZES)
    return {
        name: save_quantized(model, tmp_path_factory.mktemp("described"), {}, quantize)
        for name, quantize in QUANTIZERS.items()
    }


@pytest.fixture
def undescribed(saved: dict[str, tuple[Path, Path]], tmp_path: Path) -> Make:
    """Copies a quantizer's checkpoint, whose config.json does not describe it, with weights named as AutoGPTQ does."""

    def make(quantizer: str) -> Path:
        stored, _ = saved[quantizer]
        config = json.loads((stored / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "gptq_model-4bit-32g.safetensors").symlink_to(stored / "model.safetensors")
        return tmp_path

    return make


def write(folder: Path, name: str, options: Mapping[str, Any]) -> None:
    (folder / name).write_text(json.dumps(options, indent=2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_that_of_the_weights_that_the_checkpoint_stands_for(
    layout: str, saved: dict[str, tuple[Path, Path]], undescribed: Make
) -> None:
    quantizer, name, options = LAYOUTS[layout]
    folder = undescribed(quantizer)
    write(folder, name, options)
    expected, dense_bytes = logits(saved[quantizer][1], torch.float32, 23)
    found, num_bytes = logits(folder, torch.float32, 23, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert num_bytes == dense_bytes
    by_default = logits(folder, torch.float32, 23)
    of_flag = logits(folder, torch.float32, 23, quantize=quantizer.split()[0])
    assert torch.equal(by_default[0], of_flag[0])


@pytest.mark.native
@pytest.mark.parametrize("layout", ["AutoGPTQ", "AutoAWQ"])
def test_the_weights_are_described_with_the_memory_of_loading(layout: str, undescribed: Make, capsys: Any) -> None:
    quantizer, name, options = LAYOUTS[layout]
    folder = undescribed(quantizer)
    write(folder, name, options)
    check.main([str(folder), "--dtype", "bfloat16", "--json"])
    described = json.loads(capsys.readouterr().out)["layout"]
    assert described["quantization"].startswith(f"{quantizer}: 21 weights stay in 4 bits")
    model = load_model(LoadOptions(folder, torch.bfloat16, torch.device("cpu"), 16), RankGroup())
    assert described["ranks"][0]["weight_bytes"] == model.weight_bytes


@pytest.mark.parametrize(
    ("layout", "flag", "message"),
    [
        ("AutoGPTQ", "awq", "--quantize is awq, but the checkpoint is quantized as gptq; remove the flag"),
        ("AutoGPTQ", "eetq", "--quantize is eetq, but the checkpoint is quantized as gptq; remove the flag"),
        ("AutoAWQ", "gptq", "--quantize is gptq, but the checkpoint is quantized as awq; remove the flag"),
        ("AWQ under GPTQ's name", "gptq", "--quantize is gptq, but the checkpoint is quantized as awq"),
    ],
)
def test_a_flag_that_contradicts_the_file_is_refused(layout: str, flag: str, message: str, undescribed: Make) -> None:
    quantizer, name, options = LAYOUTS[layout]
    folder = undescribed(quantizer)
    write(folder, name, options)
    with pytest.raises(ConfigError, match=message):
        logits(folder, torch.float32, 1, quantize=flag)


def test_config_json_comes_first_then_the_file_of_autogptq(undescribed: Make) -> None:
    folder = undescribed("gptq")
    write(folder, AWQ, AWQ_OPTIONS)
    assert quantization_config(folder) == {
        "quant_method": "awq",
        "zero_point": True,
        "group_size": 32,
        "bits": 4,
        "version": "GEMM",
    }
    write(folder, GPTQ, GPTQ_OPTIONS)
    assert quantization_config(folder) == GPTQ_OPTIONS
    config = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", config | {"quantization_config": None})
    assert quantization_config(folder) == GPTQ_OPTIONS
    (folder / GPTQ).write_text("{")
    write(folder, "config.json", config | {"quantization_config": gptq_options(4, 32)})
    assert quantization_config(folder) == gptq_options(4, 32)


@pytest.mark.parametrize("name", [GPTQ, AWQ])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "/{name} is damaged: "),
        ("\xff", "/{name} is damaged: "),
        ("[4, 32]", "/{name} is not a JSON object"),
        ('{"bits": 5, "group_size": 32}', "bits is 5, must be one of 2, 3, 4, 8|weights of 5 bits in the layout"),
        ('{"bits": 4, "group_size": 0}', "quantization_config.group_size is 0, must be -1 or at least 1"),
        ('{"quant_method": "exl2"}', "quantized with 'exl2', which is not supported"),
    ],
)
def test_a_file_that_is_damaged_or_not_supported_is_refused(
    name: str, text: str, message: str, undescribed: Make
) -> None:
    folder = undescribed("gptq")
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message.format(name=name)):
        logits(folder, torch.float32, 1)


def test_another_tool_s_file_of_the_same_name_says_nothing(saved: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    _, dense = saved["gptq"]
    for path in dense.iterdir():
        (tmp_path / path.name).symlink_to(path)
    write(tmp_path, AWQ, {"calibration": "text"})
    assert quantization_config(tmp_path) is None
    expected, _ = logits(dense, torch.float32, 23)
    assert torch.equal(logits(tmp_path, torch.float32, 23)[0], expected)
    assert torch.equal(
        logits(tmp_path, torch.float32, 23, quantize="eetq")[0], logits(dense, torch.float32, 23, quantize="eetq")[0]
    )
