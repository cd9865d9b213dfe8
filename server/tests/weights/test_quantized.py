"""Weights that stay quantized: taken apart without loss, multiplied as the module of the kernels states, in models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import finish, model_metadata, raw_writer, save_gguf
from model_driver import ModelDriver
from native_builds import native_ops
from penstock_server.device.quantized import QuantFormat, QuantizedMatrix
from penstock_server.device.reference.ops import TorchOps
from penstock_server.layers.linear import DenseWeights
from penstock_server.layers.quantized import QuantizedWeights
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.gguf.block import FORMATS, unpack
from penstock_server.weights.gguf.checkpoint import GgufCheckpoint
from penstock_server.weights.gguf.folder import gguf_folder
from quantized_matrices import random_matrix
from test_gguf import finite_blocks
from tiny_models import make_model, prompts

CPU = torch.device("cpu")
# Formats of checkpoints that GGUF files do not have.
AFFINE = (
    QuantFormat(4, 128, 8, has_mins=True, number="float16", zeros="uint4"),
    QuantFormat(4, 32, 8, has_mins=True, number="bfloat16", zeros="uint8"),
    QuantFormat(4, 64, 8, has_mins=True, number="float16", zeros="float16"),
    QuantFormat(4, 32, 8, has_mins=True, number="bfloat16"),
    QuantFormat(4, 32, 8, number="bfloat16"),
)
EVERY_TYPE = pytest.mark.parametrize("type_", FORMATS, ids=lambda type_: type_.name)


def raw_rows(type_: GGMLQuantizationType, num_rows: int, num_columns: int) -> np.ndarray:
    block_weights, _ = GGML_QUANT_SIZES[type_]
    return finite_blocks(type_, num_rows * num_columns // block_weights).reshape(num_rows, -1)


@EVERY_TYPE
def test_blocks_are_taken_apart_without_loss(type_: GGMLQuantizationType) -> None:
    raw, format_ = raw_rows(type_, 5, 512), FORMATS[type_]
    rows = unpack(torch.from_numpy(raw), type_)
    assert int(rows.codes.max()) < 1 << format_.bits
    assert torch.equal(rows.dequantized(format_), torch.from_numpy(dequantize(raw, type_)))
    if format_.number == "e8m0":
        assert torch.equal(rows.scales.log2().round().exp2(), rows.scales)
    else:
        exact_in = {"float16": torch.float16, "int8": torch.int8, "uint4": torch.uint8}[format_.number]
        assert all(torch.equal(numbers.to(exact_in).float(), numbers) for numbers in rows.numbers)
    if format_.number == "uint4":
        assert max(float(numbers.max()) for numbers in rows.numbers) < 16
    assert all(torch.equal(factors.half().float(), factors) for factors in rows.factors)


@EVERY_TYPE
def test_a_checkpoint_hands_out_parts_as_they_are_stored(type_: GGMLQuantizationType, tmp_path: Path) -> None:
    raw = raw_rows(type_, 600, 768)  # several pieces
    writer = raw_writer(
        tmp_path / "q.gguf", {"general.architecture": "qwen2"} | model_metadata(make_model("qwen2").config, "qwen2")
    )
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=type_)
    writer.add_tensor("blk.0.ffn_up_exps.weight", raw.reshape(3, 200, -1), raw_dtype=type_)
    finish(writer)
    checkpoint = GgufCheckpoint(tmp_path / "q.gguf")
    whole = torch.from_numpy(dequantize(raw, type_))
    for part in (None, Part(0, range(3, 577)), Part(0, range(7, 7)), Part(1, range(256, 768))):
        matrices = checkpoint.quantized("blk.0.attn_q.weight", part)
        assert matrices is not None
        assert_equal(matrices[0], whole if part is None else part.of(whole))
    assert checkpoint.quantized("blk.0.attn_q.weight", Part(1, range(8, 768))) is None
    each = torch.from_numpy(dequantize(raw, type_)).view(3, 200, 768)
    for part in (None, Part(0, range(1, 3)), Part(1, range(9, 150)), Part(2, range(256, 768))):
        matrices = checkpoint.quantized("blk.0.ffn_up_exps.weight", part)
        assert matrices is not None
        for matrix, expected in zip(matrices, each if part is None else part.of(each), strict=True):
            assert_equal(matrix, expected)
    assert checkpoint.quantized("blk.0.ffn_up_exps.weight", Part(2, range(8, 768))) is None


def assert_equal(matrix: QuantizedMatrix, expected: torch.Tensor) -> None:
    pieces = [rows.dequantized(matrix.format) for rows in matrix.pieces()]
    assert matrix.shape == expected.shape
    assert torch.equal(torch.cat([*pieces, expected[:0]]), expected)


def weights_of(*matrices: QuantizedMatrix, bias: torch.Tensor | None = None) -> QuantizedWeights:
    return QuantizedWeights(matrices, bias, torch.bfloat16, CPU)


@pytest.mark.native
@pytest.mark.parametrize("format_", dict.fromkeys([*FORMATS.values(), *AFFINE]), ids=str)
@torch.inference_mode()
def test_products_are_those_of_the_dense_weights_but_for_the_rounding_of_the_input(format_: QuantFormat) -> None:
    ops, num_rows = native_ops(), 70
    matrices = random_matrix(format_, num_rows, 512), random_matrix(FORMATS[GGMLQuantizationType.Q8_0], 30, 512)
    bias = torch.randn(100).bfloat16()
    layer = weights_of(*matrices, bias=bias)
    dense, _ = layer.dense()
    x = torch.randn(9, 512).bfloat16()
    expected = torch.nn.functional.linear(x.double(), dense.double(), bias.double())
    found = layer.pack(ops)(x).double()
    size = dense.double().norm(dim=1) * x.double().norm(dim=1, keepdim=True)
    assert ((found - expected).abs() / size).max() < 0.01
    torch.testing.assert_close(layer.without_bias().pack(ops)(x).double() + bias, found, atol=0.02, rtol=0.02)
    order = torch.randperm(num_rows)
    one = weights_of(matrices[0])
    assert torch.equal(one.reorder(order).pack(ops)(x), one.pack(ops)(x)[:, order])
    head, lookup = one.pack_tied(ops)
    assert torch.equal(head(x), one.pack(ops)(x))
    ids = torch.tensor([3, 69, 0, 3])
    assert torch.equal(lookup(ids), dense[ids])
    assert torch.equal(one.lookup(ops)(ids), dense[ids])


@pytest.mark.native
@torch.inference_mode()
def test_a_gated_layer_is_that_of_the_dense_weights() -> None:
    format_ = FORMATS[GGMLQuantizationType.Q4_1]
    layer = weights_of(random_matrix(format_, 40, 64), random_matrix(format_, 40, 64))
    x = torch.randn(3, 64).bfloat16()
    native = layer.pack(native_ops(), gated=True)(x).float()
    plain = DenseWeights(layer.dense()[0]).pack(TorchOps(), gated=True)(x).float()
    assert native.shape == (3, 40)
    assert (native - plain).norm() < 0.05 * plain.norm()


@pytest.mark.native
def test_what_does_not_fit_is_refused() -> None:
    kernels = native_ops()._kernels
    good = (4, 4, 32, 8, False, "float16", None, None, "integer")
    for bad, message in (
        ((4, 7, 32, 8, False, "float16", None, None, "integer"), "a code has 7 bits, must have 2 to 6 or 8"),
        (
            (4, 4, 24, 8, False, "float16", None, None, "integer"),
            "a group has 24 features, must have 16 or a multiple of 32",
        ),
        ((4, 4, 32, 256, False, "float16", None, None, "integer"), "the offset is 256, must be a code"),
        ((0, 4, 32, 8, False, "float16", None, None, "integer"), "a segment has 0 rows"),
        ((4, 4, 32, 8, False, "int4", None, None, "integer"), "scales cannot be stored as int4"),
        ((4, 4, 32, 8, True, "float16", "int4", None, "integer"), "zero points cannot be stored as int4"),
        ((4, 4, 32, 8, True, "uint8", None, None, "integer"), "scales as U8 do not go with zero points as None"),
        ((4, 4, 32, 8, True, "float16", "int8", None, "integer"), r"scales as F16 do not go with .* as Some\(I8\)"),
        ((4, 4, 32, 8, True, "int8", "uint4", None, "integer"), r"scales as I8 do not go with .* as Some\(U4\)"),
        ((4, 4, 32, 8, False, "float16", "uint4", None, "integer"), r"scales as F16 do not go with .* as Some\(U4\)"),
        (
            (4, 4, 32, 8, False, "float16", None, [0] * 16, "integer"),
            "a table goes with codes of 4 bits and without an offset or mins",
        ),
        (
            (4, 5, 32, 0, False, "float16", None, [0] * 16, "integer"),
            "a table goes with codes of 4 bits and without an offset or mins",
        ),
        ((4, 8, 32, 0, False, "float32", None, None, "e3m4"), "a code cannot be e3m4"),
        ((4, 4, 32, 0, False, "float32", None, None, "e5m2"), "a code of 8-bit floats has 8 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.quantized([bad], 64, None, False, 16)
    with pytest.raises(ValueError, match="the segments of gate and up differ in their rows"):
        kernels.quantized([good, (2, *good[1:])], 64, None, True, 16)
    with pytest.raises(ValueError, match="some segments have integers and others floating-point numbers"):
        kernels.quantized([good, (4, 8, 32, 0, False, "float32", None, None, "e4m3fn")], 64, None, False, 16)
    packing = kernels.quantized([good], 64, None, False, 16)
    codes, scales = torch.full((4, 64), 15, dtype=torch.uint8), torch.ones(4, 2)
    for arguments, message in (
        ((codes + 1, [scales], []), "codes contains 16, which has more than 4 bits"),
        ((codes[:, :32], [scales], []), r"codes has shape \[4, 32\], must be \[4, 64\]"),
        ((codes, [scales[:, :1]], []), r"numbers has shape \[4, 1\], must be \[4, 2\]"),
        ((codes, [scales, scales], []), "2 numbers and 0 factors do not go with"),
        ((codes.repeat(2, 1), [scales.repeat(2, 1)], []), "codes has 8 rows, the weight lacks 4"),
    ):
        with pytest.raises(ValueError, match=message):
            packing.add_rows(*arguments)
    with pytest.raises(ValueError, match="0 rows were packed, which are not the weight's"):
        packing.finish()


@pytest.mark.native
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize(
    ("variant", "architecture"), [("llama", "llama"), ("llama-tied", "llama"), ("qwen2", "qwen2")], ids=str
)
def test_a_model_is_served_as_it_is_stored(variant: str, architecture: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    path = save_gguf(make_model(variant, **sizes), tmp_path / "tiny.gguf", architecture, kind)
    folder, text = gguf_folder(path), prompts(1, [23], 131)[0]

    def logits(dequantize: bool, *chunks: int, activation_bits: int = 8) -> tuple[torch.Tensor, int]:
        options = LoadOptions(folder, torch.bfloat16, CPU, 16, dequantize=dequantize, activation_bits=activation_bits)
        model = load_model(options, RankGroup())
        driver = ModelDriver(model, 16)
        driver.step([(driver.sequence(text[::-1]), len(text))], every_row=True)
        sequence = driver.sequence(text)
        found = [driver.step([(sequence, count)], every_row=True) for count in chunks]
        return torch.cat([rows for rows in found if rows is not None]).float(), model.weight_bytes

    (stored, stored_bytes), (dense, dense_bytes) = logits(False, 23), logits(True, 23)
    assert stored_bytes < dense_bytes * 0.75
    # With inputs of 16 bits, the products differ in their rounding only. Inputs of 8 bits add an error of their own,
    # which kernels that round bfloat16 elsewhere change a little.
    assert (logits(False, 23, activation_bits=16)[0] - dense).norm() < 0.04 * dense.norm()
    assert (stored - dense).norm() < 0.08 * dense.norm()
    assert not torch.equal(stored, dense)
    # Alone, in chunks and token by token, to the bit.
    assert torch.equal(stored, logits(False, *[1] * 23)[0])
    assert torch.equal(stored, logits(False, 7, 16)[0])


@pytest.mark.native
@pytest.mark.parametrize("dim", [40, 32, 7, 1])
@torch.inference_mode()
def test_gate_and_up_of_one_matrix_are_those_of_two(dim: int) -> None:
    matrix = random_matrix(FORMATS[GGMLQuantizationType.Q4_1], 2 * dim, 64)
    rows = matrix.whole()
    halves = [
        replace(matrix, shape=(dim, 64), pieces=partial(iter, [rows.select(slice(first, first + dim))]))
        for first in (0, dim)
    ]
    x, bias, ops = torch.randn(3, 64).bfloat16(), torch.randn(2 * dim).bfloat16(), native_ops()
    whole = weights_of(replace(matrix, pieces=lambda: iter([rows])), bias=bias).pack(ops, gated=True)(x)
    assert torch.equal(whole, weights_of(*halves, bias=bias).pack(ops, gated=True)(x))
