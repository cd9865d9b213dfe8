"""Options and tensors that tools name differently: checkpoints of ModelOpt, AutoRound and FP8 in the forms in which
they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from native_builds import BUILD
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.weights.format import quantization_config
from penstock_server.weights.kv_scale import check_scales
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.quantization.exclusion import check_exclusions
from penstock_server.weights.quantization.method import quantization_method
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from quantized_checkpoints import (
    FILE,
    Quantize,
    Tensors,
    awq,
    compressed,
    compressed_fp4,
    float8,
    gemv,
    gptq,
    modelopt_w4a16,
    nvfp4,
    renamed,
    rescaled,
    save_quantized,
)
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import SIZES, auto_round_options, logits
from tiny_models import make_model

NVFP4 = nvfp4(("weight", "weight_scale_2"), divides=False, inputs="input_scale")


def read(tensors: Tensors, options: Mapping[str, Any], folder: Path) -> torch.Tensor:
    """The weight of `layer`, alone in a file, dequantized; as it is kept, if it is, it is the same."""
    path = folder / FILE
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((path,)), options)
    assert list(checkpoint.names()) == ["layer.weight"]
    found = torch.empty(checkpoint.shape("layer.weight"))
    checkpoint.read("layer.weight", None, found)
    for matrix in checkpoint.quantized("layer.weight", None) or ():
        assert torch.equal(torch.cat(list(matrix.dense_pieces())), found)
    checkpoint.close()
    return found


def weight(rows: int = 128, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


def mxfp8(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    exponents = (values.unflatten(1, (-1, 32)).abs().amax(2) / 448).log2().ceil()
    spread = (2.0**exponents).repeat_interleave(32, 1)
    codes = (values / spread).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": (exponents + 127).to(torch.uint8)}, codes.float() * spread


def in_four_dimensions(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, exact = float8("block", 128)(name, values)
    scale = tensors.pop(f"{name}.weight_scale_inv")
    return {**tensors, f"{name}.weight_scale": scale[:, None, :, None]}, exact


def int8(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = values.abs().amax(1) / 127
    codes = (values / scale[:, None]).round().to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale[:, None]


def modelopt(algorithm: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm} | others


def compressed_floats(bits: int, group: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
LAYERS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "modelopt, a scale for each output": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), float8("row")),
    "modelopt, blocks": (modelopt("FP8_PB_WO"), in_four_dimensions),
    "modelopt mxfp8": (modelopt("MXFP8"), mxfp8),
    "modelopt w8a8": (modelopt("W8A8_SQ_PER_CHANNEL"), int8),
    "modelopt, smoothed": (modelopt("W8A8_SQ_PER_CHANNEL"), rescaled(int8)),
    "modelopt nvfp4 awq": (modelopt("NVFP4_AWQ"), rescaled(NVFP4)),
    "modelopt w4a16 awq": (modelopt("W4A16_AWQ", group_size=64), rescaled(modelopt_w4a16(64))),
    "modelopt without its method": ({"quant_algo": "NVFP4", "quant_library": "modelopt"}, NVFP4),
    "modelopt in mixed precision": (
        modelopt("MIXED_PRECISION", quantized_layers={"layer": {"quant_algo": "NVFP4", "group_size": 16}}),
        NVFP4,
    ),
    "modelopt's groups": (
        {"quant_method": "modelopt", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
        float8("tensor"),
    ),
    "compressed mxfp8": (compressed_floats(8, 32), mxfp8),
    "auto-round mxfp8": (auto_round_options("auto_round:llm_compressor", data_type="mx_fp", bits=8), mxfp8),
    "auto-round nvfp4": (
        auto_round_options("auto_round:llm_compressor", data_type="nv_fp", bits=4),
        nvfp4(("weight_packed", "weight_global_scale"), divides=True),
    ),
    "auto-round fp8": (auto_round_options("auto_round:fp8_static", data_type="fp", bits=8), float8("tensor")),
    "auto-round of symmetric weights": (auto_round_options("auto_round", sym=True), gptq(4, 32, symmetric=True)),
    "auto-round by its kernels": (
        {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "backend": "autoround:exllamav2"},
        gptq(4, 32, symmetric=True, version=2),
    ),
    "auto-round without a packing": (
        {"quant_method": "intel/auto-round", "bits": 2, "group_size": 32, "sym": False},
        gptq(2, 32, symmetric=False),
    ),
    "auto-round awq by its kernels": (
        {"quant_method": "auto_round", "bits": 4, "group_size": 32, "backend": "auto_round:awq:gemm"},
        awq(32),
    ),
    "gptqmodel's names": (
        {"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 32, "sym": False},
        gptq(4, 32, symmetric=False, version=2),
    ),
    "awq by gptqmodel": (
        {"quant_method": "awq", "format": "gemv", "bits": 4, "group_size": 64, "modules_to_not_convert": "visual"},
        gemv(64, fast=False),
    ),
    "gptq without groups": (
        {"quant_method": "QuantizationMethod.GPTQ", "bits": 4, "group_size": None, "desc_act": True},
        gptq(4, -1, symmetric=True, in_order=False),
    ),
    "fp8, exponents of blocks": (
        BLOCKS | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        renamed(mxfp8, weight_scale="weight_scale_inv"),
    ),
    "fp8, DeepSeek-V4's name": (BLOCKS, renamed(float8("block"), weight_scale_inv="scale")),
    "fp8, Mistral's other name": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        renamed(float8("tensor"), weight_scale="weight_scale_inv", input_scale="activation_scale"),
    ),
    "another name of fp8": ({"quant_method": "finegrained_fp8", "activation_scheme": "dynamic"}, float8("row")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_weight_that_it_stands_for(name: str, tmp_path: Path) -> None:
    options, quantize = LAYERS[name]
    tensors, exact = quantize("layer", weight())
    torch.testing.assert_close(read(tensors, options, tmp_path), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_fp4_is_what_compressed_tensors_decompresses(kind: str, tmp_path: Path) -> None:
    """Random codes and scales. The library rounds to bfloat16."""
    group = 16 if kind == "nvfp4" else 32
    strategy = "tensor_group" if kind == "nvfp4" else "group"
    arguments = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=group, symmetric=True)
    tensors = {"weight_packed": torch.randint(0, 256, (48, 64), dtype=torch.uint8)}
    if kind == "nvfp4":
        tensors["weight_scale"] = (torch.rand(48, 128 // group) * 448).to(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.tensor([977.5])
    else:
        tensors["weight_scale"] = torch.randint(100, 140, (48, 128 // group), dtype=torch.uint8)
    compressor = BaseCompressor.get_value_from_registry(f"{kind}-pack-quantized")
    expected = compressor.decompress(dict(tensors), QuantizationScheme(targets=["Linear"], weights=arguments))
    options = compressed_floats(4, group)
    found = read({f"layer.{name}": tensor for name, tensor in tensors.items()}, options, tmp_path)
    torch.testing.assert_close(found, expected["weight"].float(), rtol=2**-7, atol=0)


def group(targets: list[str], layout: str, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "format": layout, "weights": weights, "input_activations": {"num_bits": 8}}


def test_groups_of_compressed_tensors_have_formats_of_their_own(tmp_path: Path) -> None:
    """q, k and v with an NVFP4 scale each, MXFP4 and MXFP8 next to integers."""
    four = {"num_bits": 4, "type": "float"}
    groups = {
        "a": group(["re:.*self_attn.*"], "nvfp4-pack-quantized", **four, strategy="tensor_group", group_size=16),
        "b": group(["model.layers.0.mlp.up_proj"], "mxfp4-pack-quantized", **four, strategy="group", group_size=32),
        "c": group(["re:.*down_proj"], "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
        "d": group(["Linear"], "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    }

    def quantize(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if "self_attn" in name:
            return compressed_fp4("nvfp4")[1](name, values)
        if name == "model.layers.0.mlp.up_proj":
            return compressed_fp4("mxfp4")[1](name, values)
        return (mxfp8 if "down_proj" in name else compressed(4, "group", 32, symmetric=True)[1])(name, values)

    options = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    stored, dense = save_quantized(make_model("llama", **SIZES), tmp_path, options, quantize)
    expected, _ = logits(dense, torch.float32, 23)
    found, _ = logits(stored, torch.float32, 23, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    if BUILD is not None:
        found, _ = logits(stored, torch.bfloat16, 23)
        assert (found - expected).norm() < 0.08 * expected.norm()


@pytest.mark.parametrize("name", ["hf_quant_config.json", "config.json"])
@pytest.mark.parametrize(("algorithm", "quantize"), [("NVFP4", NVFP4), ("FP8", float8("tensor"))])
def test_modelopt_describes_a_checkpoint_in_either_file(
    name: str, algorithm: str, quantize: Quantize, tmp_path: Path, capsys: Any
) -> None:
    described = {
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.embed*", "model.layers.7*"],
        },
    }
    stored, dense = save_quantized(make_model("llama", **SIZES), tmp_path, {}, quantize)
    config = json.loads((stored / "config.json").read_text())
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    if name == "config.json":
        described = config | {"quantization_config": described}
    (stored / name).write_text(json.dumps(described))
    tensors = load_file(stored / FILE)
    for letter in "kv":
        tensors[f"model.layers.0.self_attn.{letter}_proj.{letter}_scale"] = torch.tensor(0.5)
    save_file(tensors, stored / FILE)
    expected, _ = logits(dense, torch.float32, 23)
    found, _ = logits(stored, torch.float32, 23, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert check.main([str(stored), "--json"]) in (0, 1)  # without a tokenizer
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["quantization"].startswith("modelopt: ")
    assert any("inputs of 4 bits" in note for note in report["notes"]) == (algorithm == "NVFP4")


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_quant_algo": "NVFP4"}, {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}],
    ids=str,
)
def test_scales_of_keys_in_4_bits_are_not_those_of_fp8(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"made for 4 bits \(NVFP4\), not for fp8; remove --kv-cache-dtype, or use a"):
        check_scales(options)
    for fp8 in ({"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_scheme": "FP8"}, None):
        check_scales(fp8)


@pytest.mark.parametrize("place", [("compression_config",), ("text_config", "quantization_config")])
def test_the_options_may_have_another_place(place: tuple[str, ...], tmp_path: Path) -> None:
    config: dict[str, Any] = {"quant_method": "sparseml", "config_groups": {}}
    for key in reversed(place):
        config = {key: config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = quantization_config(tmp_path)
    assert quantization_method(options) == "compressed-tensors"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'"),
        (
            {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            "transform_config has R4 at input, which is not supported",
        ),
        ({"sparsity_config": {"format": "dense"}}, ""),
        ({"transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}}}, ""),
    ],
)
def test_rotated_inputs_and_sparse_weights_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    given, quantize = compressed(4, "group", 32, symmetric=True)
    if not message:
        tensors, exact = quantize("layer", weight())
        assert torch.equal(read(tensors, given | options, tmp_path), exact)
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(quantize("layer", weight())[0], given | options, tmp_path)


def test_a_file_of_modelopt_that_quantizes_no_weights_says_nothing(tmp_path: Path) -> None:
    described = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    assert quantization_config(tmp_path) is None


def mixed(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    if name == "model.layers.1.mlp.down_proj":
        return {f"{name}.weight": values}, values
    return gptq(8 if "mlp" in name else 4, 64 if "self_attn.q" in name else 32, symmetric=False)(name, values)


EXTRA = {
    r".*\.mlp\.": {"bits": 8},
    "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float", "group_size": None},
    r"self_attn\.q": {"group_size": 64},
}


def test_layers_of_auto_round_differ(tmp_path: Path) -> None:
    options = auto_round_options("auto_round:auto_gptq", extra_config=EXTRA, to_quant_block_names="model.layers")
    stored, dense = save_quantized(make_model("llama", **SIZES), tmp_path, options, mixed)
    expected, _ = logits(dense, torch.float32, 23)
    found, _ = logits(stored, torch.float32, 23, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "quantize", "message"),
    [
        (
            auto_round_options("auto_round:qbits"),
            gptq(4, 32, symmetric=True),
            "in the packing 'auto_round:qbits' are not",
        ),
        (
            auto_round_options("auto_round", data_type="mx_int"),
            awq(32),
            "data_type is 'mx_int', which is not supported",
        ),
        (
            auto_round_options("auto_round", extra_config=[1]),
            awq(32),
            r"extra_config is \[1\], must be an object of obj",
        ),
        (
            auto_round_options("auto_round", extra_config={"layer": {"bits": 16}}),
            gptq(4, 32, symmetric=True),
            "extra_config says that layer is not quantized, but it has a qweight",
        ),
        (
            auto_round_options("auto_round:auto_awq", extra_config={"lay.r": {"bits": 16}, "layer": {"bits": 16}}),
            awq(32),
            "extra_config says that layer is not quantized, but it has a qweight",
        ),
        (
            auto_round_options("auto_round", extra_config={"x": {"data_type": "nv_fp"}}),
            awq(32),
            r"extra_config\['x'\].data_type is 'nv_fp', but others are integers",
        ),
        (
            modelopt("W4A8_AWQ"),
            modelopt_w4a16(32),
            "quant_algo is 'W4A8_AWQ', which is not supported; supported are FP8",
        ),
        (modelopt("NVFP4", exclude_modules=["lay*"]), NVFP4, "exclude_modules says that layer is not quantized, but"),
        (modelopt("NVFP4"), renamed(NVFP4, weight_scale_2="x"), "has layer.weight, but neither layer.weight_global_sc"),
        (
            compressed_floats(4, 8),
            NVFP4,
            "floating-point weights of 4 bits in groups of 8 are not supported; supported",
        ),
    ],
    # Not of functions: their texts differ between processes.
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_served_is_named(
    options: dict[str, Any], quantize: Quantize, message: str, tmp_path: Path
) -> None:
    tensors, _ = quantize("layer", weight())
    with pytest.raises(ConfigError, match=message):
        read(tensors, options, tmp_path)


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf")])
def test_a_scale_of_the_whole_weight_that_is_not_positive_is_refused(number: float, tmp_path: Path) -> None:
    tensors, _ = NVFP4("layer", weight())
    tensors["layer.weight_scale_2"].fill_(number)
    with pytest.raises(
        ConfigError, match=rf"{FILE}: tensor layer.weight_scale_2 is damaged: it is {number}, must be a"
    ):
        read(tensors, modelopt("NVFP4"), tmp_path)


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("intel/auto-round", "auto-round"),
        ("auto_round", "auto-round"),
        ("inc", "auto-round"),
        ("modelopt_fp4", "modelopt"),
        ("compressed_tensors", "compressed-tensors"),
        ("FP8", "fp8"),
        ("fbgemm-fp8", "fbgemm_fp8"),
        ("gptq_marlin", "gptq"),
        ("exl2", "exl2"),
    ],
)
def test_a_method_has_several_names(stated: str, name: str) -> None:
    assert quantization_method({"quant_method": stated}) == name


@pytest.mark.parametrize("option", ["exclude", "exclude_modules", "ignore", "module_not_to_convert", "ignored_layers"])
def test_layers_are_excluded_by_wildcards_in_every_list(option: str) -> None:
    check_exclusions({option: ["*lm_head", "*.gate"]}, ["model.layers.0.mlp.gate_proj.weight"])
    with pytest.raises(ConfigError, match=rf"{option} says that model.layers.0.mlp.gate is not quantized, but it is"):
        check_exclusions({option: ["*lm_head", "*.gate"]}, ["model.layers.0.mlp.gate.weight"])
