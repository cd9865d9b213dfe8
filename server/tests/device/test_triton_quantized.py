"""The Triton kernels of quantized weights against the weights that they stand for, on a GPU or in Triton's interpreter.

The interpreter truncates where it should round to bfloat16, so there the kernels run in float32 and float16 only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_mxfp4
import torch
import torch.nn.functional as F
import transformers
from penstock_server import device as devices
from penstock_server.device.quantized import QuantFormat, QuantizedMatrix
from penstock_server.device.triton import device as triton_device
from penstock_server.layers.quantized import QuantizedWeights
from penstock_server.weights.gguf.block import IQ4, MXFP4
from quantized_checkpoints import save_quantized
from quantized_matrices import random_matrix
from test_quantized_checkpoints import CASES, SIZES, logits
from tested_device import DEVICE, one_order_of_sums, triton_skip_reason
from tiny_models import make_model, prompts
from torch import Tensor
from torch._subclasses import FakeTensorMode

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton import quantized as triton_quantized
from penstock_server.device.triton.grouped import Assignment, Gate, GroupedLinear, GroupedQuantized
from penstock_server.device.triton.ops import TritonOps
from penstock_server.device.triton.quantized import QuantizedLinear, Tile
from penstock_server.layers.experts import triton_experts

FLOATS = ["compressed fp8", "fp8", "fp8 in blocks", "fbgemm_fp8"]
TABLES = ["bitsandbytes nf4", "bitsandbytes nf4, double", "bitsandbytes fp4"]
pytestmark = pytest.mark.usefixtures("on_tested_device")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [dtype for dtype in TOLERANCE if DEVICE.type == "cuda" or dtype != torch.bfloat16]
FORMATS = {
    "2 bits, K": QuantFormat(2, 16, has_mins=True, number="uint4"),
    "2 bits, zero points": QuantFormat(2, 32, has_mins=True, number="bfloat16", zeros="uint4"),
    "4 bits, zero points": QuantFormat(4, 128, has_mins=True, number="float16", zeros="uint8"),
    "4 bits, zero points in float16": QuantFormat(4, 64, has_mins=True, number="float16", zeros="float16"),
    "4 bits, offset and mins": QuantFormat(4, 32, offset=8, has_mins=True, number="bfloat16"),
    "3 bits": QuantFormat(3, 64, offset=4, number="float16"),
    "3 bits, K": QuantFormat(3, 16, offset=4, number="int8"),
    "4 bits": QuantFormat(4, 128, offset=8, number="float16"),
    "4 bits, mins": QuantFormat(4, 32, has_mins=True, number="float16"),
    "4 bits, K": QuantFormat(4, 32, has_mins=True, number="int8"),
    "4 bits, uneven groups": QuantFormat(4, 96, offset=8, has_mins=True),
    "5 bits": QuantFormat(5, 32, offset=16, number="float16"),
    "5 bits, K": QuantFormat(5, 32, has_mins=True, number="int8"),
    "6 bits, K": QuantFormat(6, 16, offset=32, number="int8"),
    "8 bits": QuantFormat(8, 32, offset=128, number="float16"),
    "8 bits, long groups": QuantFormat(8, 512, offset=128, number="float16"),
    "8 bits, one group": QuantFormat(8, 4096, offset=128),
    "e4m3fn": QuantFormat(8, 4096, code="e4m3fn"),
    "e4m3fn in blocks": QuantFormat(8, 128, code="e4m3fn"),
    "e5m2": QuantFormat(8, 32, code="e5m2"),
    "IQ4_NL": QuantFormat(4, 32, number="float16", table=IQ4),
    "IQ4_XS": QuantFormat(4, 32, number="int8", table=IQ4),
    "MXFP4": QuantFormat(4, 32, number="e8m0", table=MXFP4),
    "NVFP4": QuantFormat(4, 16, table=MXFP4),
    "NF4": QuantFormat(4, 64, table=tuple(range(-120, 136, 16))),
}
FOUR_BITS, MIXED = FORMATS["4 bits"], (FORMATS["4 bits, K"], FORMATS["6 bits, K"])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE, dtype)


def weights(*matrices: QuantizedMatrix, bias: Tensor | None = None, dtype: torch.dtype) -> QuantizedWeights:
    return QuantizedWeights(matrices, bias, dtype, DEVICE)


def assert_near(found: Tensor, expected: Tensor, size: Tensor) -> None:
    """size: what the sum of the products' magnitudes may reach."""
    assert found.shape == expected.shape
    excess = (found.double() - expected).abs() - TOLERANCE[found.dtype] * size
    assert excess.max() <= 1e-9, excess.max()


def assert_products(layer: QuantizedWeights, num_rows: int) -> None:
    dtype = layer.dtype
    dense, bias = layer.dense()
    x = random(7, num_rows, dense.shape[1], dtype=dtype)
    found = layer.pack(TritonOps(DEVICE, dtype))(x)
    assert found.dtype == dtype
    expected = F.linear(x.double(), dense.double(), None if bias is None else bias.double())
    assert_near(found, expected, dense.double().norm(dim=1) * x.double().norm(dim=1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dense_weights(name: str, dtype: torch.dtype) -> None:
    """Not a whole number of blocks, of tiles of outputs, nor, where groups allow it, of units."""
    depth = 632 if FORMATS[name].number == "float32" else 640
    assert_products(weights(random_matrix(FORMATS[name], 70, depth), dtype=dtype), 5)


@pytest.mark.parametrize("depth", [16, 32, 256, 288, 1024])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 40, 130])
def test_any_number_of_rows_and_features(num_rows: int, depth: int) -> None:
    assert_products(weights(random_matrix(FORMATS["6 bits, K"], 33, depth), dtype=torch.float32), num_rows)


def test_no_rows_give_no_rows() -> None:
    linear, lookup = TritonOps(DEVICE, torch.float32).pack_quantized([random_matrix(FOUR_BITS, 9, 256)], None)
    assert linear(random(1, 0, 256)).shape == (0, 9)
    assert lookup(torch.tensor([], dtype=torch.int64)).shape == (0, 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formats", [(FOUR_BITS,) * 3, (MIXED[0], MIXED[0], MIXED[1])], ids=["one", "several"])
def test_fused_layers_have_any_formats_and_a_bias(formats: tuple[QuantFormat, ...], dtype: torch.dtype) -> None:
    matrices = [random_matrix(format_, num, 512) for format_, num in zip(formats, (70, 20, 21), strict=True)]
    assert_products(weights(*matrices, bias=random(3, 111, dtype=dtype), dtype=dtype), 3)


def test_inputs_may_be_part_of_a_wider_tensor() -> None:
    linear, _ = TritonOps(DEVICE, torch.float32).pack_quantized([random_matrix(FOUR_BITS, 9, 256)], None)
    wide = random(1, 4, 600)
    assert torch.equal(linear(wide[:, 300:556]), linear(wide[:, 300:556].contiguous()))
    transposed = random(2, 256, 4)
    assert torch.equal(linear(transposed.t()), linear(transposed.t().contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("formats", [(FOUR_BITS, FOUR_BITS), MIXED], ids=["one format", "two formats"])
@pytest.mark.parametrize("depth", [256, 768])
def test_a_gated_layer_is_that_of_the_dense_weights(
    depth: int, formats: tuple[QuantFormat, QuantFormat], has_bias: bool, dtype: torch.dtype
) -> None:
    matrices = [random_matrix(format_, 70, depth) for format_ in formats]
    bias = random(3, 140, dtype=dtype) if has_bias else None
    layer = weights(*matrices, bias=bias, dtype=dtype)
    dense, _ = layer.dense()
    x = random(4, 3, depth, dtype=dtype) / 8
    gate, up = F.linear(x.double(), dense.double(), None if bias is None else bias.double()).chunk(2, dim=1)
    found = layer.pack(TritonOps(DEVICE, dtype), gated=True)(x)
    assert_near(found, F.silu(gate) * up, 4 * (1 + gate.abs()) * (1 + up.abs()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_looked_up_to_the_bit(dtype: torch.dtype) -> None:
    ids = torch.tensor([90, 0, 3, 70])
    for format_ in (FORMATS["3 bits, K"], FORMATS["4 bits, K"], FORMATS["IQ4_XS"], FORMATS["MXFP4"]):
        layer = weights(random_matrix(format_, 70, 288), random_matrix(MIXED[1], 21, 288), dtype=dtype)
        _, lookup = layer.pack_tied(TritonOps(DEVICE, dtype))
        # A GPU rounds code * scale + min once.
        tolerance = TOLERANCE[dtype] if format_.has_mins and DEVICE.type == "cuda" else 0
        torch.testing.assert_close(lookup(ids), layer.dense()[0][ids], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["4 bits", "8 bits, one group"])
def test_a_row_has_the_same_bits_in_every_batch(name: str, gated: bool, dtype: torch.dtype) -> None:
    """With every tile of rows. The layer has several splits."""
    matrix, bias = random_matrix(FORMATS[name], 70, 600), random(3, 70, dtype=dtype)
    linear, _ = TritonOps(DEVICE, dtype).pack_quantized([matrix], bias, gated=gated)
    x = random(6, 131, 600, dtype=dtype) / 16
    with one_order_of_sums():
        whole = linear(x)
        assert whole.isfinite().all()
        for rows in (slice(0, 1), slice(130, 131), slice(3, 19), slice(20, 50), slice(60, 120), slice(10, 80)):
            assert torch.equal(linear(x[rows]), whole[rows])


def test_splits_depend_on_the_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, _ = TritonOps(DEVICE, torch.float32).pack_quantized([random_matrix(FOUR_BITS, 40, 1024)], None)
    x, launched = random(1, 20, 1024), []
    with_partials = linear(x)
    launch = triton_device.launch
    monkeypatch.setattr(
        triton_device,
        "launch",
        lambda function, *rest, **named: launched.append(function) or launch(function, *rest, **named),
    )
    monkeypatch.setattr(triton_quantized, "_MAX_PARTIAL_BYTES", 0)
    assert torch.equal(linear(x), with_partials)
    assert launched == [triton_quantized.product_kernel]


@pytest.mark.parametrize("name", FORMATS)
def test_the_memory_is_that_of_the_format(name: str) -> None:
    matrix = random_matrix(FORMATS[name], 64, 4096)
    packed = QuantizedLinear.pack([matrix], None, torch.float16, DEVICE)
    tensors = [tensor for segment in packed.segments for tensor in segment.weight if tensor is not None]
    assert 1 <= sum(tensor.nbytes for tensor in tensors) / matrix.num_bytes < 1.02


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake device stands in for a GPU")
@pytest.mark.parametrize("num_rows", [1, 300])
@pytest.mark.parametrize("name", ["4 bits", "MXFP4"])
def test_a_layer_waits_for_nothing(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be recorded in a CUDA graph."""
    linear, _ = TritonOps(DEVICE, torch.float32).pack_quantized([random_matrix(FORMATS[name], 40, 1024)], None)
    assert isinstance(linear, QuantizedLinear)
    launches: list[Any] = []
    monkeypatch.setattr(triton_device, "launch", lambda function, grid, **_: launches.append((function, grid)))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor).to("cuda")

        segments = tuple(
            replace(each, weight=type(each.weight)(*(part if part is None else fake(part) for part in each.weight)))
            for each in linear.segments
        )
        x = torch.empty(num_rows, 1024, dtype=torch.float16, device="cuda")
        y = replace(linear, segments=segments)(x)
    assert y.device.type == "cuda"
    assert len(launches) == 2


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is loaded on the CPU")
@pytest.mark.parametrize("name", ["gptq in activation order", "w4a16 asymmetric", *FLOATS, *TABLES])
def test_a_checkpoint_stays_quantized(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, quantize = CASES[name]
    model = make_model("qwen2", **SIZES)
    stored, dense = save_quantized(model, tmp_path, options, quantize)
    expected, dense_bytes = logits(dense, torch.float32, 3)
    ops = TritonOps(DEVICE, torch.float32)
    monkeypatch.setattr(devices, "choose_ops", lambda *_, **__: ops)
    found, num_bytes = logits(stored, torch.float32, 3)
    # The codebooks are rounded to tables of integers.
    assert (found - expected).norm() < (0.03 if name in TABLES else 1e-4) * expected.norm()
    assert num_bytes < dense_bytes * 0.4


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is loaded on the CPU")
@pytest.mark.parametrize("name", ["gptq in activation order", "awq", "fp8 in blocks"])
def test_experts_stay_quantized(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, quantize = CASES[name]
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=131
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stored, dense = save_quantized(model, tmp_path, options, quantize)
    expected, dense_bytes = logits(dense, torch.float32, 3)
    ops, grouped = TritonOps(DEVICE, torch.float32), []
    monkeypatch.setattr(devices, "choose_ops", lambda *_, **__: ops)
    pack = triton_experts._grouped_quantized
    monkeypatch.setattr(triton_experts, "_grouped_quantized", lambda each: grouped.append(pack(each)) or grouped[-1])
    found, num_bytes = logits(stored, torch.float32, 3)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert len(grouped) == 2
    assert num_bytes < dense_bytes * 0.5


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is loaded on the CPU")
def test_the_experts_of_gpt_oss_stay_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = test_mxfp4.make_model(4)
    folder, text = test_mxfp4.save(model, tmp_path), prompts(1, [23], 131)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
    _, dense_bytes = logits(folder, torch.float32, 3, dequantize=True)
    ops = TritonOps(DEVICE, torch.float32)
    monkeypatch.setattr(devices, "choose_ops", lambda *_, **__: ops)
    found, num_bytes = logits(folder, torch.float32, 23)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert num_bytes < dense_bytes * 0.8  # embedding, head and attention are not quantized


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is loaded on the CPU")
@pytest.mark.parametrize("has_narrow_inputs", [False, True])
def test_inputs_are_quantized_if_the_checkpoint_says_so(
    has_narrow_inputs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, quantize = CASES["w8a8"]
    if has_narrow_inputs:
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
        group = options["config_groups"]["group_0"] | {"input_activations": inputs}
        options = options | {"config_groups": {"group_0": group}}
    stored, dense = save_quantized(make_model("qwen2", **SIZES), tmp_path, options, quantize)
    expected, _ = logits(dense, torch.float32, 3)
    ops = TritonOps(DEVICE, torch.float32)
    monkeypatch.setattr(devices, "choose_ops", lambda *_, **__: ops)
    found, _ = logits(stored, torch.float32, 3)
    error = (found - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.05 if has_narrow_inputs else error < 1e-4


@pytest.mark.parametrize("name", ["3 bits, K", "4 bits, mins", "e4m3fn in blocks", "MXFP4"])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_experts_are_those_of_the_dense_weights(name: str, is_ordered: bool, is_gated: bool) -> None:
    """The first and the last of five experts are on other ranks."""
    mine, num_experts, depth, num_outputs, top_k = range(1, 4), 5, 288, 70, 2
    orders = [torch.randperm(depth, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    orders[1] = None  # in order
    layers = [
        weights(
            replace(random_matrix(FORMATS[name], num_outputs, depth), order=orders[index] if is_ordered else None),
            bias=random(index, num_outputs),
            dtype=torch.float32,
        )
        for index in range(len(mine))
    ]
    grouped = triton_experts._grouped(layers)
    assert isinstance(grouped, GroupedQuantized)
    grouped = replace(grouped, gate=Gate("silu" if is_gated else ""))
    x = random(8, 90, depth)
    experts = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(90)]).to(DEVICE)

    def multiply(x: Tensor, experts: Tensor) -> Tensor:
        pairs = torch.zeros(len(mine), len(x), dtype=torch.int32)
        listed = [(experts.flatten() == expert).nonzero()[:, 0] for expert in mine]
        for row, its_pairs in zip(pairs, listed, strict=True):
            row[: len(its_pairs)] = its_pairs
        counts = torch.tensor([len(its_pairs) for its_pairs in listed], dtype=torch.int32, device=DEVICE)
        output = x.new_zeros((experts.numel(), grouped.out_features))
        grouped(x, Assignment(experts.float(), experts.int(), counts, pairs.to(DEVICE), num_experts), output)
        return output.unflatten(0, (-1, top_k))

    found = multiply(x, experts)
    expected = torch.zeros(90, top_k, grouped.out_features, dtype=torch.float64, device=DEVICE)
    size = torch.ones(90, top_k, 1, dtype=torch.float64, device=DEVICE)
    for expert, layer in zip(mine, layers, strict=True):
        dense, bias = layer.dense()
        assert bias is not None
        row, place = (experts == expert).nonzero(as_tuple=True)
        result = F.linear(x[row].double(), dense.double(), bias.double())
        if is_gated:
            gate, up = result.chunk(2, dim=1)
            result = F.silu(gate) * up
        expected[row, place] = result
        size[row, place] = (dense.double().norm() * x[row].double().norm(dim=1) + 1)[:, None]
    assert_near(found, expected, size)
    assert torch.equal(multiply(x[7:8], experts[7:8])[0], found[7])


def test_experts_of_several_formats_are_dequantized() -> None:
    layers = [weights(random_matrix(format_, 9, 256), dtype=torch.float32) for format_ in MIXED]
    assert isinstance(triton_experts._grouped(layers), GroupedLinear)


def test_tiles_of_older_tritons_fit_the_tensor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.9, each of the eight products of a block has an accumulator of its own."""
    rows = {}
    for capability, version in (((10, 0), (3, 8)), ((10, 0), (3, 9)), ((9, 0), (3, 6))):
        monkeypatch.setattr(triton_device, "capability", lambda device, found=capability: found)
        monkeypatch.setattr(triton_device, "_triton_version", lambda found=version: found)
        rows[capability, version] = Tile.of(4096, torch.bfloat16, 4, DEVICE).rows
    assert list(rows.values()) == [64, 128, 128]
