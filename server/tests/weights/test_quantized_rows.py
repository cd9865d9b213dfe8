"""Parts of quantized weights: rows and columns are what they are in the whole weight, in every shape and grouping."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.quantization.method import method_of
from penstock_server.weights.quantization.stored import Affine, unpack_bits
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from quantized_checkpoints import Tensors, awq, bits_and_bytes, compressed, gemv, gptq, hqq, marlin, pack
from safetensors.torch import save_file
from test_quantized_checkpoints import CASES

DTYPES = {
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.float32: "F32",
}


# Halves and quarters as ranks have them, whole groups of some formats, and a half of a group.
COLUMNS = ((0, 256), (0, 128), (128, 256), (64, 128), (192, 256), (32, 96), (16, 48), (8, 40))


@dataclass(frozen=True)
class Header:
    dtype: str
    shape: tuple[int, ...]


def found(options: dict[str, Any], tensors: Tensors) -> tuple[Affine, Any]:
    """The weight among these tensors, and the function that reads them."""

    def read(name: str, rows: range | None = None) -> torch.Tensor:
        return tensors[name] if rows is None else tensors[name][rows.start : rows.stop]

    headers = {name: Header(DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    weight = method_of(options, read).find(headers)["x.weight"]
    assert isinstance(weight, Affine)
    return weight, read


def check(data: st.DataObject, options: dict[str, Any], tensors: Tensors, exact: torch.Tensor) -> None:
    weight, read = found(options, tensors)
    assert weight.shape == exact.shape
    torch.testing.assert_close(weight.dense(read), exact, atol=1e-5, rtol=1e-5)
    start = data.draw(st.integers(0, len(exact)), "start")
    rows = range(start, data.draw(st.integers(start, len(exact)), "stop"))
    mine, order = weight.rows(read, rows).dequantized(weight.format), weight.order(read)
    assert torch.equal(mine if order is None else mine[:, order.argsort()], weight.dense(read)[rows.start : rows.stop])


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_rows_are_those_of_the_whole_weight(data: st.DataObject) -> None:
    kind = data.draw(
        st.sampled_from(["gptq", "awq", "gemv", "gemv_fast", "marlin", "packed", "hqq", "int8", "bitsandbytes"])
    )
    group = data.draw(st.sampled_from([-1, 16, 32, 64]), "group")
    in_features = data.draw(st.integers(1, 3), "groups") * max(group, 32)
    # As many outputs as the words of zero points hold.
    unit = {"gptq": 32, "awq": 8, "gemv": 8, "gemv_fast": 4, "marlin": 64}.get(kind, 1)
    if kind.startswith("gemv"):
        group = max(32, group)
        in_features = in_features // 32 * 64
    weight = torch.randn(data.draw(st.integers(1, 3)) * unit, in_features)
    if kind == "gptq":
        bits, symmetric = data.draw(st.sampled_from([2, 3, 4, 8]), "bits"), data.draw(st.booleans(), "symmetric")
        is_ordered = data.draw(st.booleans(), "ordered")
        options = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
        tensors, exact = gptq(bits, group, symmetric=symmetric, in_order=is_ordered)("x", weight)
    elif kind == "awq":
        group = in_features if group < 0 else group
        options = {"quant_method": "awq", "bits": 4, "group_size": group}
        tensors, exact = awq(group)("x", weight)
    elif kind in ("gemv", "gemv_fast"):
        options = {"quant_method": "awq", "bits": 4, "group_size": group, "version": kind}
        tensors, exact = gemv(group, fast=kind == "gemv_fast")("x", weight)
    elif kind == "marlin":
        options = {"quant_method": "gptq", "bits": 4, "group_size": group, "checkpoint_format": "marlin"}
        tensors, exact = marlin(group, ("B", "s"))("x", weight)
    elif kind == "packed":
        group = in_features if group < 0 else group
        bits, is_ordered = data.draw(st.sampled_from([4, 8]), "bits"), data.draw(st.booleans(), "ordered")
        options, quantize = compressed(bits, "group", group, symmetric=True, in_order=is_ordered)
        tensors, exact = quantize("x", weight)
    elif kind == "hqq":
        group = in_features if group < 0 else group
        options = {"quant_method": "hqq"}
        tensors, exact = hqq(data.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8])), group)(
            "x", weight.expand(8, -1, -1).flatten(0, 1)
        )
    elif kind == "int8":
        strategy, symmetric = data.draw(st.sampled_from(["channel", "tensor"])), data.draw(st.booleans(), "symmetric")
        options, quantize = compressed(8, strategy, None, symmetric=symmetric)
        tensors, exact = quantize("x", weight)
    else:
        options = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        tensors, exact = bits_and_bytes("int8")("x", weight)
    check(data, options, tensors, exact)


@pytest.mark.parametrize("case", CASES)
def test_columns_of_whole_groups_stay_quantized_and_others_are_dequantized(case: str, tmp_path: Path) -> None:
    options, quantize = CASES[case]
    name = "model.layers.0.mlp.down_proj"
    tensors, exact = quantize(name, torch.randn(64, 256, generator=torch.Generator().manual_seed(3)))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((tmp_path / "model.safetensors",)), options)
    (whole,) = checkpoint.quantized(f"{name}.weight", None) or ()
    every = torch.cat(list(whole.dense_pieces()))
    assert (every - exact).abs().max() < 0.02  # tables of integers are near the codebooks
    stay = set()
    for start, stop in COLUMNS:
        columns = range(start, stop)
        part = Part(1, columns)
        dense = torch.empty(part.shape_of((64, 256)))
        checkpoint.read(f"{name}.weight", part, dense)
        torch.testing.assert_close(dense, part.of(exact), atol=1e-5, rtol=1e-5)
        matrices = checkpoint.quantized(f"{name}.weight", part)
        group = whole.format.group
        is_whole = len(columns) == 256 or (whole.order is None and columns.start % group == len(columns) % group == 0)
        assert (matrices is not None) == is_whole, columns
        if matrices is not None:
            stay.add((start, stop))
            assert matrices[0].shape == (64, len(columns))
            assert torch.equal(torch.cat(list(matrices[0].dense_pieces())), part.of(every))
    is_cut = whole.order is None and whole.format.group < 256
    assert ((0, 128) in stay, (128, 256) in stay) == (is_cut, is_cut)
    checkpoint.close()


@given(st.integers(1, 8), st.integers(1, 70), st.data())
@settings(max_examples=60, deadline=None)
def test_numbers_of_any_width_and_count_are_unpacked(bits: int, count: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=count, max_size=count))
    padded = values + [0] * (-len(values) % 32)
    words = torch.tensor([pack(padded, bits)] * 2, dtype=torch.int32)
    assert unpack_bits(words, bits, count).tolist() == [values, values]
