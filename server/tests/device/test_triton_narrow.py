"""Layers whose weights and inputs have 8 bits, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from penstock_server.device.quantized import QuantFormat
from penstock_server.device.triton import device as triton_device
from penstock_server.layers.quantized import quantized_to_float8
from quantized_matrices import random_matrix
from tested_device import DEVICE, triton_skip_reason
from torch import Tensor
from torch._subclasses import FakeTensorMode

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton.narrow import NarrowSegment, quantize
from penstock_server.device.triton.ops import TritonOps
from penstock_server.device.triton.quantized import QuantizedLinear

pytestmark = pytest.mark.usefixtures("on_tested_device")
INT8 = QuantFormat(8, 4096, offset=128, has_narrow_inputs=True)
FLOAT8 = QuantFormat(8, 4096, code="e4m3fn", has_narrow_inputs=True)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "depth"), [(1, 32), (5, 632), (17, 256), (40, 640), (70, 1100), (130, 96)])
def test_products_are_those_of_quantized_inputs(num_rows: int, depth: int, has_bias: bool, dtype: torch.dtype) -> None:
    matrix, bias = random_matrix(INT8, 70, depth), random(3, 70, dtype=dtype) if has_bias else None
    linear, _ = TritonOps(DEVICE, dtype).pack_quantized([matrix], bias)
    x = random(4, num_rows, depth, dtype=dtype)
    codes, scales = quantize(x, "integer")
    inputs = codes.double() * scales.double()[:, None]
    assert ((inputs - x).abs() <= 0.502 * scales[:, None]).all()
    weight = matrix.whole().dequantized(INT8).to(DEVICE).double()
    expected = F.linear(inputs, weight, None if bias is None else bias.double())
    torch.testing.assert_close(linear(x), expected.to(dtype), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-3)


def test_inputs_become_the_nearest_codes() -> None:
    x = random(1, 3, 1500)
    codes, scales = quantize(x, "integer")
    assert torch.equal(scales, x.abs().amax(1) / 127)
    assert torch.equal(codes, (x * (1 / scales)[:, None]).round().to(torch.int8))
    codes, scales = quantize(x, "e4m3fn")
    assert torch.equal(scales, x.abs().amax(1) / 448)
    expected = (x * (1 / scales)[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(codes, expected.view(torch.int8))
    assert torch.equal(quantized_to_float8(x).scales[:, 0], scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("code", ["integer", "e4m3fn"])
def test_what_is_not_finite_spoils_its_row_only(code: str, value: float) -> None:
    x = random(1, 3, 64)
    x[1, 7] = value
    assert quantize(x, code)[1].isfinite().tolist() == [True, False, True]
    assert not quantize(torch.zeros(1, 64), code)[0].any()


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    linear, _ = TritonOps(DEVICE, torch.float16).pack_quantized([random_matrix(INT8, 70, 600)], None)
    x = random(6, 131, 600, dtype=torch.float16)
    whole = linear(x)
    for rows in (slice(0, 1), slice(130, 131), slice(3, 19), slice(20, 50), slice(60, 120)):
        assert torch.equal(linear(x[rows]), whole[rows])


def test_a_gated_layer_and_rows_of_the_weight() -> None:
    matrices = [random_matrix(INT8, 20, 64), random_matrix(INT8, 20, 64)]
    ops = TritonOps(DEVICE, torch.float32)
    x = random(1, 3, 64)
    plain, lookup = ops.pack_quantized(matrices, None)
    gate, up = plain(x).chunk(2, dim=1)
    torch.testing.assert_close(ops.pack_quantized(matrices, None, gated=True)[0](x), F.silu(gate) * up)
    weight = torch.cat([matrix.whole().dequantized(INT8) for matrix in matrices]).to(DEVICE)
    ids = torch.tensor([39, 0, 7], device=DEVICE)
    assert torch.equal(lookup(ids), weight[ids])


@pytest.mark.parametrize("has_bias", [False, True])
def test_floats_are_multiplied_by_the_library(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the library has this product too."""
    monkeypatch.setattr(triton_device, "multiplies_float8", lambda _: True)
    matrix = random_matrix(FLOAT8, 48, 640)
    bias = random(3, 48, dtype=torch.bfloat16) if has_bias else None
    linear, _ = TritonOps(DEVICE, torch.bfloat16).pack_quantized([matrix], bias)
    assert isinstance(linear, QuantizedLinear)
    assert isinstance(linear.segments[0], NarrowSegment)
    x = random(4, 33, 640, dtype=torch.bfloat16)
    codes, scales = quantize(x, "e4m3fn")
    inputs = codes.view(torch.float8_e4m3fn).double() * scales.double()[:, None]
    weight = matrix.whole().dequantized(FLOAT8).to(DEVICE).double()
    expected = F.linear(inputs, weight, None if bias is None else bias.double())
    found = linear(x)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize(
    ("format_", "dtype", "outputs"),
    [
        (FLOAT8, torch.float16, 48),
        (FLOAT8, torch.bfloat16, 40),
        (replace(FLOAT8, code="e5m2"), torch.bfloat16, 48),
        (replace(FLOAT8, has_narrow_inputs=False), torch.bfloat16, 48),
    ],
)
def test_where_the_library_has_no_product_weights_become_wider(
    format_: QuantFormat, dtype: torch.dtype, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_device, "multiplies_float8", lambda _: True)
    linear = QuantizedLinear.pack([random_matrix(format_, outputs, 640)], None, dtype, DEVICE)
    assert not any(isinstance(segment, NarrowSegment) for segment in linear.segments)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake device stands in for a GPU")
@pytest.mark.parametrize("format_", [INT8, FLOAT8])
@pytest.mark.parametrize("num_rows", [1, 300])
def test_a_layer_waits_for_nothing(format_: QuantFormat, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be recorded in a CUDA graph. The library checks shapes, types and strides of its product."""
    segment = NarrowSegment.pack([random_matrix(format_, 48, 1024)], 0, None, DEVICE)
    launches: list[Any] = []
    monkeypatch.setattr(triton_device, "launch", lambda function, grid, **_: launches.append((function, grid)))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        weight, scales = (mode.from_tensor(each).to("cuda") for each in (segment.weight, segment.scales))
        bias = torch.empty(48, dtype=torch.bfloat16, device="cuda")
        linear = QuantizedLinear((replace(segment, weight=weight, scales=scales, bias=bias),), 48, 1024, torch.bfloat16)
        y = linear(torch.empty(num_rows, 1024, dtype=torch.bfloat16, device="cuda"))
    assert y.device.type == "cuda"
    assert len(launches) == (3 if format_ is INT8 and num_rows == 1 else 2 if format_ is INT8 else 1)
