"""Models from quantized checkpoints of every method: they equal the model with the weights that the checkpoint stands
for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import ModelDriver
from native_builds import BUILD
from penstock_server.errors import ConfigError
from penstock_server.layers.quantized import quantized_to_table
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.quantization.bitsandbytes import FP4, NF4, table_of
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.quantization.flag import AT_LOAD
from penstock_server.weights.quantization.method import method_of
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from penstock_server.weights.safetensors_header import Place
from quantized_checkpoints import (
    Quantize,
    Tensors,
    awq,
    bits_and_bytes,
    compressed,
    compressed_fp4,
    float8,
    gemv,
    gptq,
    hqq,
    marlin,
    modelopt_w4a16,
    nvfp4,
    quark,
    renamed,
    save_quantized,
)
from safetensors.torch import load_file, save_file
from tiny_models import make_model, prompts

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


def gptq_options(bits: int, group: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | others


def auto_round_options(packing: str, **others: Any) -> dict[str, Any]:
    common = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
    return common | {"data_type": "int", "autoround_version": "0.8.0", "iters": 200} | others


def quark_options(**of_all: Any) -> dict[str, Any]:
    options, _ = quark("int8", "per_channel")
    return options | {"global_quant_config": options["global_quant_config"] | of_all}


def mixed_gptq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The layers as DYNAMIC says."""
    if name == "model.layers.1.self_attn.q_proj":
        return {f"{name}.weight": weight}, weight
    if name.endswith("down_proj"):
        return gptq(8, 64, symmetric=True)(name, weight)
    return gptq(3 if ".mlp." in name else 4, 32, symmetric=".mlp." not in name)(name, weight)


DYNAMIC = {
    r"-:model\.layers\.1\.self_attn\.q": {},
    r"+:.*\.down_proj$": {"bits": 8, "group_size": 64},
    r".*\.mlp\.": {"bits": 3, "sym": False},
}
HQQ = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
CASES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq 4 bits": (gptq_options(4, 32), gptq(4, 32, symmetric=True)),
    "gptq 2 bits": (gptq_options(2, 32), gptq(2, 32, symmetric=True)),
    "gptq 3 bits": (gptq_options(3, 64), gptq(3, 64, symmetric=True)),
    "gptq 8 bits, one group": (gptq_options(8, -1), gptq(8, -1, symmetric=True)),
    "gptq asymmetric": (gptq_options(4, 32, sym=False), gptq(4, 32, symmetric=False)),
    "gptq in activation order": (
        gptq_options(4, 32, desc_act=True, sym=False),
        gptq(4, 32, symmetric=False, in_order=False),
    ),
    "gptq version 2": (
        gptq_options(4, 32, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 32, symmetric=False, version=2),
    ),
    "gptq dynamic": (gptq_options(4, 32, dynamic=DYNAMIC), mixed_gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq(32)),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, gemv(32, fast=False)),
    "awq gemv_fast": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv_fast"},
        gemv(64, fast=True),
    ),
    "awq marlin": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "marlin", "zero_point": False},
        marlin(32, ("qweight", "scales")),
    ),
    "gptq marlin": (gptq_options(4, -1, is_marlin_format=True), marlin(-1, ("B", "s"))),
    "w4a16": compressed(4, "group", 32, symmetric=True),
    "w4a16 asymmetric": compressed(4, "group", 32, symmetric=False),
    "w4a16 in activation order": compressed(4, "group", 32, symmetric=False, in_order=False),
    "w8a16": compressed(8, "group", 32, symmetric=True),
    "w8a8": compressed(8, "channel", None, symmetric=True),
    "w8a8, static inputs": compressed(8, "channel", None, symmetric=True, has_static_inputs=True),
    "w8a8, one scale": compressed(8, "tensor", None, symmetric=True),
    "w8a8 asymmetric": compressed(8, "channel", None, symmetric=False),
    "w8a8 asymmetric, one scale": compressed(8, "tensor", None, symmetric=False),
    "compressed fp8": compressed(8, "channel", None, symmetric=True, kind="float"),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, float8("tensor")),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, float8("block")),
    "fp8 of Mistral": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        renamed(float8("tensor"), weight_scale="qscale_weight", input_scale="qscale_act"),
    ),
    "nvfp4": compressed_fp4("nvfp4"),
    "nvfp4 with inputs of 4 bits": compressed_fp4("nvfp4", inputs=4),
    "mxfp4": compressed_fp4("mxfp4"),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, float8("tensor")),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head*"]},
        nvfp4(("weight", "weight_scale_2"), divides=False, inputs="input_scale"),
    ),
    "modelopt w4a16": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, modelopt_w4a16(32)),
    "auto-round": (auto_round_options("auto_round"), gptq(4, 32, symmetric=False, version=2)),
    "auto-round, gptq": (auto_round_options("auto_round:auto_gptq"), gptq(4, 32, symmetric=False)),
    "auto-round, awq": (auto_round_options("auto_round:auto_awq"), awq(32)),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, float8("row")),
    "quark fp8": quark("fp8_e4m3", "per_tensor"),
    "quark fp8, a scale for each output": quark("fp8_e4m3", "per_channel"),
    "quark int8": quark("int8", "per_channel"),
    "quark int8, one scale": quark("int8", "per_tensor"),
    "quark mxfp4": quark("fp4", "per_group"),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bits_and_bytes("int8")),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("nf4")),
    "bitsandbytes nf4, double": ({"load_in_4bit": True}, bits_and_bytes("nf4", nested=True)),
    "hqq 8 bits": (HQQ, hqq(8, 32)),
    "hqq 4 bits": (HQQ, hqq(4, 64)),
    "hqq 3 bits": (HQQ, hqq(3, 32)),
    "hqq 2 bits": (HQQ, hqq(2, 16)),
    "hqq 1.58 bits": (HQQ, hqq(1.58, 16)),
    "hqq 1 bit": (HQQ, hqq(1, 32)),
    "bitsandbytes fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("fp4")),
}
# Native kernels multiply 8-bit floats as the elements that dequantization gives.
FLOATS = {name for name in CASES if "fp8" in name}


def logits(
    folder: Path, dtype: torch.dtype, *chunks: int, dequantize: bool = False, quantize: str = ""
) -> tuple[torch.Tensor, int]:
    """The logits of a text in these chunks [tokens, vocab], and the bytes of the weights."""
    model = load_model(LoadOptions(folder, dtype, CPU, 16, dequantize=dequantize, quantize=quantize), RankGroup())
    driver = ModelDriver(model, 16)
    sequence = driver.sequence(prompts(1, [23], 131)[0])
    found = [driver.step([(sequence, count)], every_row=True) for count in chunks]
    return torch.cat([rows for rows in found if rows is not None]).float(), model.weight_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By case: the quantized checkpoint, and one with the weights that it stands for."""
    model = make_model("qwen2", **SIZES)
    return {
        name: save_quantized(model, tmp_path_factory.mktemp("quantized"), options, quantize)
        for name, (options, quantize) in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_the_model_of_the_weights_that_it_stands_for(
    name: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    stored, dense = folders[name]
    expected, dense_bytes = logits(dense, torch.float32, 23)
    found, num_bytes = logits(stored, torch.float32, 23, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert num_bytes == dense_bytes
    if BUILD is None:
        return
    found, num_bytes = logits(stored, torch.bfloat16, 23)
    rounded, _ = logits(dense, torch.bfloat16, 23)
    assert torch.equal(logits(stored, torch.bfloat16, 23, dequantize=True)[0], rounded)
    assert (found - expected).norm() < 0.08 * expected.norm()
    # With AMX, dense layers add up in another order, which may or may not show.
    if name not in FLOATS or not BUILD.isa.may_use_amx:
        assert torch.equal(found, rounded) == (name in FLOATS)
    assert num_bytes < dense_bytes * (0.6 if name in FLOATS else 0.5)
    # Alone, in chunks and token by token, to the bit.
    assert torch.equal(found, logits(stored, torch.bfloat16, *[1] * 23)[0])
    assert torch.equal(found, logits(stored, torch.bfloat16, 7, 16)[0])


def test_a_packed_row_may_end_within_a_word() -> None:
    """4 bits of 100 features are 12 and a half words."""
    options, quantize = compressed(4, "channel", None, symmetric=True)
    tensors, exact = quantize("layer", torch.randn(6, 100))
    headers = {name: Place("I32", tuple(tensor.shape), 0, 0) for name, tensor in tensors.items()}
    headers["layer.weight_scale"] = Place("F32", (6, 1), 0, 0)

    def read(name: str, rows: range | None = None) -> torch.Tensor:
        return tensors[name] if rows is None else tensors[name][rows.start : rows.stop]

    weight = method_of(options, read).find(headers)["layer.weight"]
    assert weight.shape == (6, 100)
    assert torch.equal(weight.dense(read), exact)


def test_groups_that_were_never_assigned_are_in_order(tmp_path: Path) -> None:
    """compressed-tensors initializes `weight_g_idx` to -1."""
    options, _ = compressed(4, "group", 32, symmetric=False, in_order=False)
    _, quantize = compressed(4, "group", 32, symmetric=False)
    tensors, exact = quantize("layer", torch.randn(16, 96))
    tensors["layer.weight_g_idx"] = torch.full((96,), -1, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((tmp_path / "model.safetensors",)), options)
    found = torch.empty(16, 96)
    checkpoint.read("layer.weight", None, found)
    torch.testing.assert_close(found, exact)
    (matrix,) = checkpoint.quantized("layer.weight", None) or ()
    assert matrix.order is None


@pytest.mark.parametrize(("bits", "group", "axis"), [(4, 64, 0), (3, 16, 0), (3, 24, 1), (8, 192, 1)])
def test_groups_of_hqq_that_the_kernels_lack_are_dequantized(bits: int, group: int, axis: int, tmp_path: Path) -> None:
    """Groups along outputs, of 24, and over several rows."""
    tensors, exact = hqq(bits, group, axis=axis)("layer", torch.randn(96, 72))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((tmp_path / "model.safetensors",)), HQQ)
    assert list(checkpoint.names()) == ["layer.weight"]
    assert checkpoint.quantized("layer.weight", None) is None
    found = torch.empty(96, 72)
    checkpoint.read("layer.weight", None, found)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_tables_of_integers_are_near_the_codebooks(kind: str) -> None:
    import bitsandbytes.functional

    codebook = bitsandbytes.functional.get_4bit_type(kind, device="cpu")
    torch.testing.assert_close(torch.tensor(NF4 if kind == "nf4" else FP4), codebook)
    table, step = table_of(codebook)
    assert len(table) == 16
    assert max(map(abs, table)) <= 127
    assert (torch.tensor(table) * step - codebook).abs().max() < 0.003


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quant_method": "exl2"},
            r"with 'exl2', which is not supported; supported are auto-round, awq, .*; serve the original model with",
        ),
        ("gptq", "quantization_config is 'gptq', must be an object"),
        (gptq_options(5, 32), "quantization_config.bits is 5, must be one of 2, 3, 4, 8"),
        (
            gptq_options(4, 32, checkpoint_format="bitblas"),
            "GPTQ weights in the layout 'bitblas' are not .*; serve the orig",
        ),
        (gptq_options(8, 32, checkpoint_format="marlin"), "weights of 8 bits packed for Marlin, with desc_act=False"),
        (gptq_options(4, 48), "groups of 48 do not divide 128 input features"),
        (gptq_options(4, 0), "quantization_config.group_size is 0, must be -1 or at least 1"),
        (gptq_options(4, "32"), "quantization_config.group_size is '32', must be -1 or at least 1"),
        (gptq_options(4, 32, desc_act=True, dynamic=[1]), r"quantization_config.dynamic is \[1\], must be an object"),
        (gptq_options(4, 32, dynamic={"+:(": {"bits": 8}}), r"has an invalid regular expression '\('"),
        (gptq_options(4, 32, dynamic={"model": 8}), r"dynamic\['model'\] is 8, must be an object"),
        (gptq_options(4, 32, dynamic={"+:model": {"bits": 5}}), "quantization_config.bits is 5, must be one of"),
        (gptq_options(4, 32, dynamic={r"-:.*\.down_proj": {}}), "layers.0.mlp.down_proj is not quantized, but it has"),
        (
            gptq_options(4, 32, dynamic={"layer": {"bits": 8}, r"model\.layers": {"bits": 8}}),
            r"down_proj.scales has shape \[4, 64\], its weight implies \[2, 64\]",
        ),
        (gptq_options(4, 8), "weights of 4 bits in groups of 8 are not supported"),
        (gptq_options(4, 64), r"layers.0.mlp.down_proj.scales has shape \[4, 64\], its weight implies \[2, 64\]"),
        (
            {"quant_method": "awq", "bits": 4, "version": "x"},
            "AWQ weights of 4 bits in the layout 'x' are not .*; serve",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 64}, r"must be|implies \[16, 16\]"),
        (
            gptq_options(4, 32, modules_in_block_to_quantize=[["self_attn.k_proj", "up_proj"], ["mlp.gate_proj"]]),
            "modules_in_block_to_quantize says that model.layers.0.mlp.down_proj is not quantized, but it is",
        ),
        (gptq_options(4, 32, modules_in_block_to_quantize="up"), "block_to_quantize is 'up', must be a list"),
        (
            gptq_options(4, 32, modules_in_block_to_quantize=[[1]]),
            r"block_to_quantize is \[\[1\]\], must be lists of names",
        ),
        (
            quark_options(weight={"dtype": "int4", "qscheme": "per_group", "group_size": 128}),
            r"global_quant_config.weight is \{'dtype': 'int4'.*, which is not supported; supported are fp8_e4m3 .*orig",
        ),
        (quark_options(weight=[{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]), r"weight is \[.*, which is not supported"),
        (
            quark_options(weight={"dtype": "int8", "qscheme": "per_tensor", "symmetric": False}),
            "which is not supported",
        ),
        (quark_options() | {"layer_quant_config": {"*": 3}}, r"layer_quant_config\['\*'\] is 3, must be an object"),
        (quark_options() | {"layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config is .* not supported"),
        ({"quant_method": "quark"}, "global_quant_config is None, must be an object"),
        (
            gptq_options(4, 32, modules_to_not_convert=["lm_head", "model.layers.0.mlp"]),
            "modules_to_not_convert says that model.layers.0.mlp.down_proj is not quantized, but it is",
        ),
    ],
    ids=str,
)
def test_options_that_are_not_supported_are_refused(
    options: object, message: str, folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    stored, _ = folders["gptq 4 bits"]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((stored / file).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        logits(tmp_path, torch.float32, 1)


LAYER = "model.layers.0.mlp.down_proj"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
NO_ROWS = r"\[0, 64\]"


@pytest.mark.parametrize(
    ("case", "tensor", "change", "message"),
    [
        ("gptq 4 bits", f"{LAYER}.scales", None, f"it has {LAYER}.qweight, but not {LAYER}.scales"),
        ("gptq 4 bits", f"{LAYER}.scales", float("nan"), f"tensor {LAYER}.scales holds NaN"),
        ("gptq 4 bits", f"{LAYER}.qzeros", 0, "has zero points of its own, but the checkpoint says that it is symm"),
        ("gptq 4 bits", f"{LAYER}.scales", float("inf"), f"tensor {LAYER}.scales holds infinity"),
        ("gptq 4 bits", f"{LAYER}.qweight", slice(0), f"tensor {LAYER}.qweight has shape {NO_ROWS}, must be a matrix"),
        ("gptq 4 bits", f"{LAYER}.qweight", torch.float32, f"tensor {LAYER}.qweight is of type F32, must be I32"),
        ("gptq 4 bits", f"{LAYER}.g_idx", slice(7), f"tensor {LAYER}.g_idx has shape"),
        ("gptq in activation order", f"{LAYER}.g_idx", None, f"it has {LAYER}.qweight, but not {LAYER}.g_idx"),
        ("awq", f"{LAYER}.qzeros", slice(1), f"tensor {LAYER}.qzeros has shape"),
        ("awq", f"{LAYER}.scales", float("nan"), f"tensor {LAYER}.scales holds NaN"),
        ("awq gemv", f"{LAYER}.qzeros", slice(1), f"tensor {LAYER}.qzeros has shape"),
        ("awq gemv_fast", f"{LAYER}.scaled_zeros", slice(1), f"tensor {LAYER}.scaled_zeros has shape"),
        ("awq marlin", f"{LAYER}.scales", slice(1), f"tensor {LAYER}.scales has shape"),
        ("gptq marlin", f"{LAYER}.s", None, f"it has {LAYER}.B, but not {LAYER}.s"),
        ("fp8", f"{LAYER}.weight_scale", float("nan"), f"tensor {LAYER}.weight_scale holds NaN"),
        ("fp8 in blocks", f"{LAYER}.weight_scale_inv", slice(1), f"tensor {LAYER}.weight_scale_inv has shape"),
        ("bitsandbytes int8", f"{LAYER}.SCB", slice(3), f"tensor {LAYER}.SCB has shape"),
        ("bitsandbytes nf4", f"{LAYER}.weight.absmax", slice(1), f"tensor {LAYER}.weight.absmax has shape"),
        ("bitsandbytes nf4", f"{LAYER}.weight", slice(9), f"tensor {LAYER}.weight has shape"),
        ("bitsandbytes nf4", f"{LAYER}.weight", torch.float32, f"tensor {LAYER}.weight is of type F32, must be U8"),
        ("bitsandbytes nf4", STATE, slice(9), f"tensor {STATE} is damaged"),
        ("bitsandbytes nf4, double", f"{LAYER}.weight.nested_absmax", None, f"but not {LAYER}.weight.nested_absmax"),
        ("bitsandbytes nf4", f"{LAYER}.weight.absmax", float("inf"), f"tensor {LAYER}.weight.absmax holds infinity"),
        ("w4a16", f"{LAYER}.weight_scale", slice(3), f"tensor {LAYER}.weight_scale has shape"),
        ("w4a16", f"{LAYER}.weight_shape", 64, rf"{LAYER}.weight_shape says \[64, 64\], but .* 64 rows of 16 words"),
        ("w4a16", f"{LAYER}.weight_shape", slice(1), f"tensor {LAYER}.weight_shape has shape"),
        (
            "w4a16 in activation order",
            f"{LAYER}.weight_g_idx",
            None,
            f"it has {LAYER}.weight_packed, but not {LAYER}.weight_g_idx",
        ),
        ("w4a16 in activation order", f"{LAYER}.weight_g_idx", 0, f"tensor {LAYER}.weight_g_idx is damaged"),
        ("w8a8 asymmetric", f"{LAYER}.weight_zero_point", None, f"but not {LAYER}.weight_zero_point"),
        ("w8a8", f"{LAYER}.weight_scale", float("nan"), f"tensor {LAYER}.weight_scale holds NaN"),
        ("quark fp8", f"{LAYER}.weight_scale", None, "is F8_E4M3, but has no weight_scale"),
        ("quark int8", f"{LAYER}.weight_scale", slice(3), f"tensor {LAYER}.weight_scale has shape"),
        ("quark mxfp4", f"{LAYER}.weight_scale", slice(3), f"tensor {LAYER}.weight_scale has shape"),
        ("quark mxfp4", f"{LAYER}.weight", torch.int8, f"{LAYER} is stored as int8, but .* says that it is fp4"),
        ("gptq in activation order", f"{LAYER}.g_idx", 0, f"tensor {LAYER}.g_idx is damaged"),
        ("fp8", f"{LAYER}.weight_scale", None, "is F8_E4M3, but has no weight_scale"),
        ("hqq 3 bits", f"{LAYER}.W_q", slice(3), f"tensor {LAYER}.W_q has shape"),
        ("hqq 4 bits", f"{LAYER}.zero", None, f"it has {LAYER}.W_q, but not {LAYER}.zero"),
        ("hqq 4 bits", f"{LAYER}.scale", float("nan"), f"tensor {LAYER}.scale holds NaN"),
        ("hqq 4 bits", f"{LAYER}.nbits", 9, f"{LAYER}: HQQ weights of 9 bits with axis 1 .* are not supported; supp"),
        ("hqq 4 bits", f"{LAYER}.shape", -1, rf"tensor {LAYER}.shape says \[-1, -1\], must be at least 1 by 1"),
        ("hqq 4 bits", f"{LAYER}.group_size", 0, "in groups of 0 of 8192 are not supported"),
        ("hqq 4 bits", f"{LAYER}.view_as_float", 1, "HQQ weights with codes stored as floats are not supported; serve"),
        ("hqq 4 bits", f"{LAYER}.quant_scale", 1, "HQQ weights with quantized scales are not supported; serve"),
        ("bitsandbytes int8", f"{LAYER}.SCB", None, f"it has {LAYER}.weight, but not {LAYER}.SCB"),
        ("bitsandbytes nf4", f"{LAYER}.weight.absmax", None, f"but not {LAYER}.weight.absmax"),
        ("w4a16", f"{LAYER}.weight_scale", None, f"but not {LAYER}.weight_scale"),
    ],
)
def test_damaged_weights_are_refused(
    case: str,
    tensor: str,
    change: float | slice | torch.dtype | None,
    message: str,
    folders: dict[str, tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    stored, _ = folders[case]
    (tmp_path / "config.json").write_bytes((stored / "config.json").read_bytes())
    tensors = load_file(stored / "model.safetensors")
    if change is None:
        del tensors[tensor]
    elif isinstance(change, slice):
        tensors[tensor] = tensors[tensor][change].clone()
    elif isinstance(change, torch.dtype):
        tensors[tensor] = tensors[tensor].to(change)
    else:
        tensors[tensor].fill_(change)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        logits(tmp_path, torch.bfloat16 if BUILD is not None else torch.float32, 1)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_at_load_4_bits_are_as_near_as_those_of_bitsandbytes(kind: str) -> None:
    import bitsandbytes.functional

    weight = torch.randn(6, 256)
    stored, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
    theirs = bitsandbytes.functional.dequantize_4bit(stored, state) - weight
    format_ = AT_LOAD[f"bitsandbytes-{kind}"]
    ours = quantized_to_table(weight, format_).dequantized(format_) - weight
    greatest = weight.unflatten(1, (-1, 64)).abs().amax(2).repeat_interleave(64, 1)
    assert (ours.abs() <= theirs.abs() + 0.004 * greatest).all()
    uneven = quantized_to_table(weight[:, :200], format_)
    assert torch.equal(uneven.codes[:, :192], quantized_to_table(weight, format_).codes[:, :192])
    assert uneven.scales.shape == (6, 4)


@pytest.mark.native
@pytest.mark.parametrize(
    ("flag", "tolerance"),
    [("eetq", 0.08), ("bitsandbytes", 0.08), ("fp8", 0.15), ("bitsandbytes-nf4", 0.5), ("bitsandbytes-fp4", 0.7)],
)
def test_a_dense_checkpoint_is_quantized_at_load(
    flag: str, tolerance: float, folders: dict[str, tuple[Path, Path]]
) -> None:
    _, dense = folders["gptq 4 bits"]
    expected, dense_bytes = logits(dense, torch.float32, 23)
    found, num_bytes = logits(dense, torch.bfloat16, 23, quantize=flag)
    assert (found - expected).norm() < tolerance * expected.norm()
    assert num_bytes < dense_bytes * 0.4
    assert torch.equal(found, logits(dense, torch.bfloat16, 7, 16, quantize=flag)[0])


@pytest.mark.parametrize(
    ("case", "flag", "message"),
    [
        ("gptq 4 bits", "awq", "--quantize is awq, but the checkpoint is quantized as gptq; remove the flag"),
        ("fp8", "eetq", "--quantize is eetq, but the checkpoint is quantized as fp8"),
        (
            "",
            "gptq",
            "--quantize gptq needs a checkpoint that is quantized, and this one is not; eetq, bitsandbytes, ",
        ),
        (
            "awq",
            "exl2",
            "--quantize exl2 is not supported; supported are awq, .*; serve the original model with --quantize eetq,",
        ),
        (
            "bitsandbytes int8",
            "bitsandbytes-nf4",
            "--quantize is bitsandbytes-nf4, but .* quantized as bitsandbytes int8; remove",
        ),
        (
            "bitsandbytes fp4",
            "bitsandbytes-nf4",
            "--quantize is bitsandbytes-nf4, but .* quantized as bitsandbytes fp4; remove",
        ),
        (
            "bitsandbytes nf4",
            "bitsandbytes-fp4",
            "--quantize is bitsandbytes-fp4, but .* quantized as bitsandbytes nf4; remove",
        ),
        (
            "modelopt nvfp4",
            "fp8",
            "--quantize is fp8, but the checkpoint is quantized as modelopt NVFP4; remove the flag",
        ),
        (
            "auto-round, awq",
            "gptq",
            "--quantize is gptq, but .* quantized as auto-round packed as awq; remove the flag",
        ),
        ("nvfp4", "fp8", "--quantize is fp8, but .* as compressed-tensors with floats of 4 bits; remove the flag"),
        ("w4a16", "fp8", "--quantize is fp8, but .* as compressed-tensors with integers of 4 bits; remove the flag"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_refused(
    case: str, flag: str, message: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    folder = folders[case][0] if case else folders["awq"][1]
    with pytest.raises(ConfigError, match=message):
        logits(folder, torch.float32, 1, quantize=flag)


@pytest.mark.parametrize("flag", AT_LOAD)
def test_quantizing_and_dequantizing_at_load_is_refused(flag: str, folders: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(
        ConfigError, match=f"--quantize {flag} quantizes .* and --dequantize asks for .*; remove one of"
    ):
        logits(folders["awq"][1], torch.float32, 1, quantize=flag, dequantize=True)


@pytest.mark.parametrize(
    ("case", "flag"),
    [
        ("gptq 4 bits", "marlin"),
        ("fbgemm_fp8", "fp8"),
        ("awq", "awq"),
        ("compressed fp8", "fp8"),
        ("modelopt fp8", "fp8"),
        ("auto-round", "marlin"),
        ("bitsandbytes nf4", "bitsandbytes-nf4"),
        ("bitsandbytes nf4, double", "bitsandbytes"),
        ("bitsandbytes fp4", "bitsandbytes-fp4"),
    ],
)
def test_a_flag_may_name_what_the_checkpoint_is(case: str, flag: str, folders: dict[str, tuple[Path, Path]]) -> None:
    folder, _ = folders[case]
    found, _ = logits(folder, torch.float32, 23, quantize=flag)
    assert torch.equal(found, logits(folder, torch.float32, 23)[0])
