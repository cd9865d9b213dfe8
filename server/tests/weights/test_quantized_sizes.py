"""Weights that stay quantized take at most 5 % more memory than the checkpoint stores, but for the exceptions that
docs/quantization.md states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from penstock_server.device.quantized import QuantizedMatrix
from penstock_server.errors import ConfigError
from penstock_server.weights.gguf.block import FORMATS
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from quantized_checkpoints import Quantize, Tensors, awq, compressed, float8, gemv, gptq
from safetensors.torch import save_file
from test_quantized_checkpoints import CASES, gptq_options

ROWS, COLUMNS = 128, 256
MOST = 1.05
EXCEPTIONS = {
    "bitsandbytes nf4, double": 1.10,  # scales become float32: a table and two sums for each would be slower
    "hqq 1 bit": 1.67,  # codes of 2 bits are the smallest
    # Products of two scales become float32.
    **dict.fromkeys(("nvfp4", "nvfp4 with inputs of 4 bits", "modelopt nvfp4"), 1.34),
}
# What the tests of models cut smaller, and the groups that weigh most.
OTHERS: dict[str, tuple[dict[str, Any], Quantize]] = {
    **{
        f"gptq {bits} bits, groups of {group}": (
            gptq_options(bits, group, sym=False),
            gptq(bits, group, symmetric=False),
        )
        for bits in (2, 3, 4, 8)
        for group in (32, 128)
    },
    "awq, groups of 128": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq(128)),
    "awq gemv, groups of 128": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        gemv(128, fast=False),
    ),
    "w4a16 asymmetric, groups of 128": compressed(4, "group", 128, symmetric=False),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, float8("block", 128)),
}
LAYERS = {name: case for name, case in (CASES | OTHERS).items() if name != "gptq dynamic"}

# Other layouts have scales of one type.
IN_BFLOAT16 = [
    (name, torch.bfloat16)
    for name, (options, _) in LAYERS.items()
    if options.get("quant_method") in ("gptq", "awq", "compressed-tensors", "hqq")
    and "marlin" not in name
    and "gemv_fast" not in name
]


def stored_layer(name: str, dtype: torch.dtype | None) -> tuple[dict[str, Any], Tensors]:
    """The options and the tensors of a layer, whose float16 scales and zero points become `dtype`."""
    options, quantize = LAYERS[name]
    tensors, _ = quantize("layer", torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)))
    if dtype is not None:
        halves = {key for key, tensor in tensors.items() if tensor.dtype in (torch.float16, torch.bfloat16)}
        tensors |= {key: tensors[key].to(dtype) for key in halves}
    return options, {key: tensor.contiguous() for key, tensor in tensors.items()}


def kept_matrix(options: dict[str, Any], tensors: Tensors, path: Path) -> QuantizedMatrix:
    save_file(tensors, path)
    found = QuantizedCheckpoint(SafetensorsCheckpoint((path,)), options).quantized("layer.weight", None)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(("name", "dtype"), [*((name, None) for name in LAYERS), *IN_BFLOAT16], ids=str)
def test_memory_is_at_most_5_percent_more_than_the_checkpoint(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    options, tensors = stored_layer(name, dtype)
    matrix = kept_matrix(options, tensors, tmp_path / "layer.safetensors")
    others = ("g_idx", "weight_g_idx", "bitsandbytes__nf4", "bitsandbytes__fp4")  # without a counterpart in memory
    stored = sum(tensor.nbytes for key, tensor in tensors.items() if not key.endswith(others))
    assert matrix.num_bytes <= EXCEPTIONS.get(name, MOST) * stored
    rows = matrix.whole()
    for numbers, number in zip(rows.numbers, matrix.format.numbers, strict=True):
        if number in ("float16", "bfloat16"):
            assert torch.equal(numbers.to(getattr(torch, number)).float(), numbers)


@pytest.mark.parametrize("type_", FORMATS, ids=lambda type_: type_.name)
def test_memory_is_at_most_5_percent_more_than_the_blocks_of_gguf(type_: GGMLQuantizationType) -> None:
    weights, num_bytes = GGML_QUANT_SIZES[type_]
    matrix = QuantizedMatrix((64, 4096), FORMATS[type_], lambda: iter(()))
    assert matrix.num_bytes <= MOST * 64 * 4096 // weights * num_bytes


def test_a_zero_point_that_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    options, tensors = stored_layer("w4a16 asymmetric", None)
    tensors["layer.weight_zero_point"] = torch.full((ROWS, COLUMNS // 32), 8, dtype=torch.int8)
    matrix = kept_matrix(options, tensors, tmp_path / "layer.safetensors")
    with pytest.raises(ConfigError, match="layer is damaged: it has zero points from 16 to 16, must be from 0 to 15"):
        matrix.whole()
