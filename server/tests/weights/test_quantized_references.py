"""Weights that our reader and another library read from the same checkpoint. Its codes, scales and zero points are
random, so that no writer of ours decides what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from penstock_server.weights.format import open_checkpoint
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from quantized_checkpoints import float8, save_quantized
from safetensors.torch import save_file
from test_quantized_checkpoints import CASES, SIZES, logits
from tiny_models import make_model, prompts
from torch import Tensor


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize(("out_features", "in_features", "group"), [(16, 64, 32), (72, 96, 16), (64, 256, 128)])
def test_awq_is_what_compressed_tensors_converts_it_to(
    out_features: int, in_features: int, group: int, tmp_path: Path
) -> None:
    num_groups = in_features // group
    tensors = {
        "layer.qweight": random_words(in_features, out_features // 8),
        "layer.qzeros": random_words(num_groups, out_features // 8),
        "layer.scales": torch.rand(num_groups, out_features).half(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    options = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((tmp_path / "model.safetensors",)), options)
    found = torch.empty(out_features, in_features)
    checkpoint.read("layer.weight", None, found)

    converted = AutoAWQConverter.from_autoawq_config(options).process(dict(tensors))
    state = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
    arguments = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state["weight_scale"] = state["weight_scale"].float()
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]
    assert torch.equal(found, expected)


def test_float8_blocks_are_what_transformers_dequantizes(tmp_path: Path) -> None:
    options, _ = CASES["fp8 in blocks"]
    stored, _ = save_quantized(make_model("qwen2", **SIZES), tmp_path, options, float8("block"))
    of_transformers = transformers.AutoModelForCausalLM.from_pretrained(
        stored,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    ).eval()
    checkpoint, _ = open_checkpoint(stored)
    weights = dict(of_transformers.named_parameters())
    quantized = [name for name in checkpoint.names() if checkpoint.quantized(name, None) is not None]
    assert len(quantized) == 21
    for name in quantized:
        found = torch.empty(checkpoint.shape(name))
        checkpoint.read(name, None, found)
        assert torch.equal(found, weights[name]), name
    with torch.inference_mode():
        expected = of_transformers(torch.tensor(prompts(1, [23], 131))).logits[0]
    torch.testing.assert_close(logits(stored, torch.float32, 23, dequantize=True)[0], expected, atol=1e-4, rtol=1e-4)
