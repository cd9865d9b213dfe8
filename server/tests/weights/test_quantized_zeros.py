"""Groups, rows and whole weights of zeros, as pruning and padding make them: the scale is what the quantizer writes for
them, or 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_builds import BUILD, CPU, native_ops
from penstock_server.layers.quantized import QuantizedWeights
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from quantized_checkpoints import Tensors
from safetensors.torch import save_file
from test_quantized_checkpoints import CASES
from torch import Tensor

LAYER = "model.layers.0.mlp.down_proj"
WEIGHT = f"{LAYER}.weight"
# How the names of tensors with scales of groups, rows or the weight end.
SCALES = (
    ".scales",
    ".scale",
    ".s",
    ".weight_scale",
    ".qscale_weight",
    ".weight_scale_inv",
    ".SCB",
    ".absmax",
    ".scaled_zeros",
)
# Scales are exponents, or quantized.
WITHOUT_FLOATS = ("quark mxfp4", "mxfp4", "bitsandbytes nf4, double")
# Zeros are the difference of two rounded numbers, or have a scale that was quantized with others.
NEARLY_ZERO = ("awq gemv_fast", "bitsandbytes nf4, double")


def read(path: Path, tensors: Tensors, options: dict[str, Any]) -> Tensor:
    """The dequantized weight, after checks that its products are finite and near it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((path,)), options)
    try:
        found = torch.empty(checkpoint.shape(WEIGHT))
        checkpoint.read(WEIGHT, None, found)
        matrices = checkpoint.quantized(WEIGHT, None)
        if matrices is not None and BUILD is not None:
            x = torch.randn(3, found.shape[1]).bfloat16()
            layer = QuantizedWeights(matrices, None, torch.bfloat16, CPU).pack(native_ops())
            product, expected = layer(x).double(), x.double() @ found.double().T
            size = x.double().norm(dim=1, keepdim=True) * found.double().norm(dim=1)
            # Zeros with zero points are the difference of two sums, each rounded.
            assert ((product - expected).abs() <= 0.01 * size + 1e-6).all()
        return found
    finally:
        checkpoint.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["group", "row", "weight"])
def test_zeros_stay_zeros(case: str, what: str, tmp_path: Path) -> None:
    options, quantize = CASES[case]
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    zeros = {"group": (slice(None), slice(32, 96)), "row": (5,), "weight": (slice(None),)}[what]
    weight[zeros] = 0
    tensors, exact = quantize(LAYER, weight)
    found = read(tmp_path / "zeros.safetensors", tensors, options)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
    if what != "group" and case not in NEARLY_ZERO:
        assert not found[zeros].any()


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_FLOATS])
def test_a_scale_of_zero_stands_for_zeros(case: str, tmp_path: Path) -> None:
    options, quantize = CASES[case]
    tensors, _ = quantize(LAYER, torch.randn(64, 128, generator=torch.Generator().manual_seed(3)))
    changed = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith(SCALES)}
    assert changed
    assert not read(tmp_path / "zeros.safetensors", {**tensors, **changed}, options).any()
