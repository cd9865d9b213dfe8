"""The operators' Triton kernels against torch's operators, on a GPU or in Triton's interpreter.

The interpreter truncates where it should round to bfloat16, so there the kernels run in float32 and float16 only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from penstock_server.device import choose_ops
from penstock_server.device.activation import ACTIVATIONS, Xielu
from penstock_server.device.ops import NormVariant, Summand
from penstock_server.device.reference.ops import TorchOps
from penstock_server.device.triton import device as triton_device
from tested_device import DEVICE, triton_skip_reason
from torch import Tensor

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton.ops import TritonOps

# numpy's, of the interpreter: a GPU computes with infinities as well, and says nothing.
pytestmark = [
    pytest.mark.usefixtures("on_tested_device"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPS, TORCH = TritonOps(DEVICE, torch.float32), TorchOps()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [dtype for dtype in TOLERANCE if DEVICE.type == "cuda" or dtype != torch.bfloat16]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype])


RMS, LAYER = NormVariant(1e-5), NormVariant(1e-5, "layer")
NORMS = {  # variant, bias
    "llama": (RMS, False),
    "gemma": (NormVariant(1e-5, is_wide=True), False),
    "layer": (LAYER, True),
    "layer without bias": (LAYER, False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dim", [5, 64, 1000])
def test_norms_equal_torch(name: str, dim: int, dtype: torch.dtype) -> None:
    variant, has_bias = NORMS[name]
    # Gemma's weights are float32 for any model.
    weight = random(1, dim, dtype=torch.float32 if variant.is_wide else dtype)
    bias = random(2, dim, dtype=dtype) if has_bias else None
    x, residual = random(3, 4, dim, dtype=dtype), random(4, 4, dim, dtype=dtype)
    expected = TORCH.norm(x, weight, bias, variant)
    assert_near(OPS.norm(x, weight, bias, variant), expected)
    total = residual.clone()
    expected = TORCH.norm(x, weight, bias, variant, total)
    assert_near(OPS.norm(x, weight, bias, variant, residual), expected)
    assert torch.equal(residual, total)


POSTS = {  # norm behind the part, factor, other summand, norm of the sum
    "gemma2": (NormVariant(1e-5, is_wide=True), 1.0, False, NormVariant(1e-5, is_wide=True)),
    "olmo2": (RMS, 1.0, False, None),
    "granite": (None, 0.22, False, RMS),
    "gpt-neox": (None, 1.0, True, LAYER),
    "all": (LAYER, 0.5, True, RMS),
    "nothing": (None, 1.0, False, None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POSTS)
def test_sums_with_the_residual_equal_torch(name: str, dtype: torch.dtype) -> None:
    inner, factor, has_other, variant = POSTS[name]
    x, residual, other = (random(seed, 3, 200, dtype=dtype)[:, :100] for seed in (1, 2, 3))
    residual = residual.contiguous()
    found, expected = residual.clone(), residual.clone()
    results = []
    for ops, stream in ((OPS, found), (TORCH, expected)):
        norm = None if variant is None else ops.pack_norm(random(4, 100, dtype=dtype), None, variant)
        post = None if inner is None else ops.pack_norm(random(5, 100, dtype=dtype), random(6, 100, dtype=dtype), inner)
        results.append(ops.add(stream, Summand(x, post, factor, other if has_other else None), norm))
    assert_near(found, expected)
    assert_near(*results)
    assert results[0].dtype == dtype


def test_a_wide_residual_gives_the_narrow_dtype_of_the_weight() -> None:
    x, weight = random(1, 3, 40), random(2, 40, dtype=torch.float16)
    assert_near(OPS.norm(x, weight, None, RMS), TORCH.norm(x, weight, None, RMS))
    assert OPS.norm(x, weight, None, RMS).dtype == torch.float16


@pytest.mark.parametrize("variant", [RMS, LAYER])
def test_heads_are_normalized_in_place_of_the_fused_projection(variant: NormVariant) -> None:
    heads = random(1, 3, 7, 20)[:, 2:6]
    for weight in (random(2, 20), random(3, 4, 20)):
        assert_near(OPS.norm(heads, weight, None, variant), TORCH.norm(heads, weight, None, variant))


def test_rows_of_part_of_a_projection_are_normalized() -> None:
    rows = random(1, 5, 48)[:, 16:40]
    assert_near(OPS.norm(rows, random(2, 24), None, RMS), TORCH.norm(rows, random(2, 24), None, RMS))
    assert OPS.norm(rows[:0], random(2, 24), None, RMS).shape == (0, 24)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(4, 4, 16, 8), (6, 1, 64, 20), (70, 2, 8, 3)])
def test_rotation_equals_torch(heads: int, kv_heads: int, dim: int, half: int, interleaved: bool) -> None:
    fused = random(1, 3, heads + kv_heads + 1, dim)
    expected = fused.clone()
    cos, sin, positions = random(2, 9, half), random(3, 9, half), torch.tensor([8, 0, 5])
    for ops, x in ((OPS, fused), (TORCH, expected)):
        ops.rotate(x[:, :heads], x[:, heads : heads + kv_heads], cos, sin, positions, interleaved=interleaved)
    assert_near(fused, expected)


@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "tanh"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_equal_torch(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([random(1, 3, 2 * 1100) * 4, torch.tensor([[-80.0, 80.0] * 1100])]).to(dtype)
    assert_near(OPS.gated(ACTIVATIONS[name])(x), TORCH.gated(ACTIVATIONS[name])(x))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2", "tanh", "xielu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_equal_torch(name: str, dtype: torch.dtype) -> None:
    small = torch.tensor([-1e-7, -1e-3, -0.2, -0.3, 0.0, 1e-6]).repeat(3, 1)
    x = torch.cat([random(1, 3, 1100) * 4, small], dim=1).to(dtype)[:, 2:]  # rows have a stride
    activation = Xielu.learned(random(2, 1), random(3, 1)) if name == "xielu" else ACTIVATIONS[name]
    computed = OPS.elementwise(activation)(x)
    assert computed.dtype == dtype
    assert_near(computed, activation(x.float()).to(dtype))


def test_a_gated_layer_equals_torch() -> None:
    weight, bias, x = random(1, 80, 24), random(2, 80), random(3, 5, 24)
    assert_near(OPS.pack_gate_up(weight, bias)(x), TORCH.pack_gate_up(weight, bias)(x))


def test_cuda_devices_get_triton_and_without_it_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_ops(CUDA, torch.bfloat16).name == "triton"
    assert choose_ops(CPU, torch.float64).name == "torch"
    monkeypatch.setattr(triton_device.importlib.util, "find_spec", lambda name: None)
    assert choose_ops(CUDA, torch.bfloat16).name == "torch"
    assert "the triton package is not installed" in caplog.text


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_device, "python_header", lambda: Path("/include/Python.h"))
    assert "needs the header /include/Python.h" in str(triton_device.unavailable_reason(CUDA))
    monkeypatch.setattr(triton_device.shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "no-compiler")
    assert 'CC is "no-compiler", which is no program' in str(triton_device.unavailable_reason(CUDA))
    monkeypatch.delenv("CC")
    assert "install one or set CC" in str(triton_device.unavailable_reason(CUDA))
    assert "not cuda" in str(triton_device.unavailable_reason(CPU))
    monkeypatch.setattr(triton_device.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(triton_device.unavailable_reason(CUDA))
