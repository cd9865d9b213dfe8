"""Biases that quantizers write for every layer, also of models whose layers have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from penstock_server.errors import ConfigError
from quantized_checkpoints import FILE, Quantize, awq, float8, gptq, save_quantized
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import SIZES, gptq_options, logits
from tiny_models import make_model

CASES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": (gptq_options(4, 32), gptq(4, 32, symmetric=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(32)),
    "fp8": ({"quant_method": "fp8"}, float8("tensor")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_only_zeros_may_be_in_the_place_of_biases_that_a_model_lacks(family: str, case: str, tmp_path: Path) -> None:
    """Zeros change nothing; other numbers would be missing from the results."""
    options, quantize = CASES[case]
    stored, dense = save_quantized(make_model(family, **SIZES), tmp_path, options, quantize)
    tensors = load_file(stored / FILE)
    biases = {
        f"{layer}.bias": torch.zeros(64, dtype=torch.float16)
        for layer, _, suffix in (name.rpartition(".") for name in tensors)
        if suffix in ("qweight", "weight_scale") and f"{layer}.bias" not in tensors
    }
    assert biases
    save_file(biases | tensors, stored / FILE)
    expected, _ = logits(dense, torch.float32, 23)
    found, _ = logits(stored, torch.float32, 23, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    name = max(biases)
    biases[name][5] = 0.25
    save_file(biases | tensors, stored / FILE)
    with pytest.raises(ConfigError, match=f"1 biases of layers that have none in this model: {name}; they are not zer"):
        logits(stored, torch.float32, 1)
