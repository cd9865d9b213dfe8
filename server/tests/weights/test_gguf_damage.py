"""Damaged GGUF files: an error that names the file, and the tensor where one is damaged, never another exception."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import finish, model_metadata, raw_writer, save_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.errors import ConfigError
from penstock_server.weights.gguf.block import FORMATS
from penstock_server.weights.gguf.checkpoint import GgufCheckpoint
from penstock_server.weights.gguf.config import model_config
from penstock_server.weights.gguf.header import read_header
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.tokenizer import tokenizer_config, tokenizer_json
from test_gguf import finite_blocks
from tiny_models import make_model

TENSOR = "blk.0.attn_q.weight"


def quantized_file(path: Path, type_: GGMLQuantizationType = GGMLQuantizationType.Q4_K, rows: int = 6) -> Path:
    """One matrix of two groups of 256 features in a row, filled with random blocks."""
    writer = raw_writer(path, {"general.architecture": "qwen2"} | model_metadata(make_model("qwen2").config, "qwen2"))
    blocks = finite_blocks(type_, rows * 512 // GGML_QUANT_SIZES[type_][0])
    writer.add_tensor(TENSOR, blocks.reshape(rows, -1), raw_dtype=type_)
    finish(writer)
    return path


def put(place: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    """Changes a number of the tensor's entry in the header, which has its name, the number of dimensions (4 bytes), two
    dimensions (8 bytes each), the type (4 bytes) and the offset (8 bytes)."""

    def change(data: bytes) -> bytes:
        start = data.index(TENSOR.encode()) + len(TENSOR) + place
        return data[:start] + struct.pack(layout, value) + data[start + struct.calcsize(layout) :]

    return change


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off in its data": (lambda data: data[:-1], rf"is truncated: tensor {TENSOR} ends at byte \d+, the file at"),
    "without data": (lambda data: data[: data.index(TENSOR.encode()) + 60], "is truncated"),
    "impossible type": (put(20, "<I", 4711), f": tensor {TENSOR} is of unknown type 4711"),
    "removed type": (put(20, "<I", 4), f": tensor {TENSOR} is of unknown type 4"),
    "type of other blocks": (put(20, "<I", 0), f"is truncated: tensor {TENSOR} ends at byte"),
    "offset beyond the file": (put(24, "<Q", 1 << 40), f"is truncated: tensor {TENSOR} ends at byte"),
    "offset of 64 bits": (put(24, "<Q", (1 << 64) - 32), f"is truncated: tensor {TENSOR} ends at byte"),
    "many columns": (put(4, "<Q", 1 << 44), f"is truncated: tensor {TENSOR} ends at byte"),
    "uneven columns": (put(4, "<Q", 500), rf"is damaged: tensor {TENSOR} has shape \[6, 500\] in type Q4_K"),
    "no rows": (put(12, "<Q", 0), rf"is damaged: tensor {TENSOR} has shape \[0, 512\] in type Q4_K"),
    "many dimensions": (put(0, "<I", 1 << 30), "is truncated or damaged: its header ends unexpectedly"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_refused_by_its_name_and_file(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    path = quantized_file(tmp_path / "model.gguf")
    GgufCheckpoint(path).close()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{path}.*{message}"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    "type_", [type_ for type_ in FORMATS if type_.name != "MXFP4"], ids=lambda type_: type_.name
)  # the scales of MXFP4 are finite
def test_a_scale_of_nan_is_refused_by_its_name_and_file(type_: GGMLQuantizationType, tmp_path: Path) -> None:
    path = quantized_file(tmp_path / "model.gguf", type_)
    size = GGML_QUANT_SIZES[type_][1]
    # Offset of a block's scale, in float16.
    place = {"Q2_K": size - 4, "Q3_K": size - 2, "Q6_K": size - 2}.get(type_.name, 0)
    data = bytearray(path.read_bytes())
    start = read_header(path).tensors[TENSOR].offset + size + place
    data[start : start + 2] = b"\xff\x7f"
    path.write_bytes(data)
    checkpoint = GgufCheckpoint(path)
    with pytest.raises(ConfigError, match=rf"{path} is damaged: tensor {TENSOR} holds NaN"):
        checkpoint.read(TENSOR, None, torch.empty(6, 512))
    matrices = checkpoint.quantized(TENSOR, None)
    assert matrices is not None
    with pytest.raises(ConfigError, match=rf"{path} is damaged: tensor {TENSOR} holds NaN"):
        matrices[0].whole()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer = make_model("llama", num_hidden_layers=1)
    path = save_gguf(layer, tmp_path_factory.mktemp("gguf") / "model.gguf", **{"general.alignment": 32})
    assert tokenizer_json(Metadata(read_header(path), path))  # or no damage of it would be seen
    return path


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_change_of_a_header_ends_in_another_exception(whole: Path, data: st.DataObject) -> None:
    """Everything that a header says is read: the tensors, the configuration and the tokenizer."""
    content = bytearray(whole.read_bytes())
    end = min(info.offset for info in read_header(whole).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, end - 1))] = data.draw(st.integers(0, 255))
    path = whole.with_name("changed.gguf")
    path.write_bytes(content)
    try:
        GgufCheckpoint(path)
        metadata = Metadata(read_header(path), path)
        for part in (model_config, tokenizer_json, tokenizer_config):
            part(metadata)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017 - most changes are harmless
