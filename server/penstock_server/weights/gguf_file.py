"""Reads GGUF files as a checkpoint: tensors dequantized, with rows and norms as Hugging Face's models have them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.finite import check_finite
from penstock_server.weights.gguf_config import BUILDERS, head_dim
from penstock_server.weights.gguf_header import TensorInfo, read_header
from penstock_server.weights.gguf_metadata import Metadata
from penstock_server.weights.gguf_names import GgufNames
from penstock_server.weights.loader import NameSource
from penstock_server.weights.mapping import MappedFile

# llama.cpp's converter interleaves the halves of each head's q and k rows for its own rope.
INTERLEAVED = {"llama": ("attn_q", "attn_k")}
# Its graphs multiply by these norms as they are, and Hugging Face's add one to them first.
COUNTED_FROM_ZERO = ("gemma", "gemma2", "gemma3")

# PERF: dequantizing makes several float32 arrays of its input. Pieces of so many weights stay in the L2 cache, keep
# the peak of memory at the weights themselves, and are too small for torch to start threads for copying them.
PIECE_WEIGHTS = 1 << 15


class GgufCheckpoint:
    """The tensors of one GGUF file, by their names in it."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        metadata = Metadata(header, path)
        if metadata.architecture not in BUILDERS:
            raise metadata.refuse(
                f"GGUF architecture {metadata.architecture!r} is not supported; supported: {', '.join(BUILDERS)}"
            )
        self.metadata = metadata
        self.head_dim = head_dim(metadata)
        self.file = MappedFile(path)
        self.interleaved = INTERLEAVED.get(metadata.architecture, ())
        self.tensors: dict[str, TensorInfo] = header.tensors
        for info in header.tensors.values():
            _check(info, self.file)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def own_names(self) -> NameSource:
        return GgufNames({name: info.shape for name, info in self.tensors.items()}, self.metadata)

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        info = self.tensors[name]
        if len(info.shape) == 1:
            self._read_vector(info, part, out)
        else:
            self._read_matrices(info, info.shape, 0, part, out)
        check_finite(out, out, name, self.file.path)
        rows, _ = _matrix(info.shape)
        self.file.forget(info.offset, info.offset + rows * _row_bytes(info))

    def close(self) -> None:
        self.file.close()

    def _read_vector(self, info: TensorInfo, part: Part | None, out: Tensor) -> None:
        vector = self._rows(info, 0, 1).view(info.shape)
        if self._is_interleaved(info):
            vector = vector.view(-1, self.head_dim // 2, 2).transpose(1, 2).reshape(info.shape)
        if self.metadata.architecture in COUNTED_FROM_ZERO and info.name.endswith("norm.weight"):
            vector = vector - 1
        out.copy_(vector if part is None else part.of(vector))

    def _read_matrices(
        self, info: TensorInfo, shape: tuple[int, ...], first_row: int, part: Part | None, out: Tensor
    ) -> None:
        """A tensor of any number of dimensions: a matrix for each index of those before the last two. `first_row` is
        where the tensor of this shape begins."""
        if len(shape) == 2:
            self._read_matrix(info, first_row, shape, part, out)
            return
        indexes, rows = range(shape[0]), _matrix(shape[1:])[0]
        if part is not None and part.dim == 0:
            indexes, part = part.range, None
        elif part is not None:
            part = Part(part.dim - 1, part.range)
        for place, index in enumerate(indexes):
            self._read_matrices(info, shape[1:], first_row + index * rows, part, out[place])

    def _read_matrix(
        self, info: TensorInfo, first_row: int, shape: tuple[int, ...], part: Part | None, out: Tensor
    ) -> None:
        rows, columns = range(shape[0]), slice(None)
        if part is not None and part.dim == 0:
            rows = part.range
        elif part is not None:
            columns = slice(part.range.start, part.range.stop)
        # An even number of rows, so that no piece cuts a pair of interleaved rows.
        step = max(2, PIECE_WEIGHTS // shape[1] // 2 * 2)
        interleaved = self._is_interleaved(info)
        # Interleaved parts are whole heads; each is put in order by itself.
        block = self.head_dim if interleaved else len(rows)
        for start in range(rows.start, rows.stop, max(1, block)):
            target = out[start - rows.start : start - rows.start + block]
            for first in range(0, block, step):
                piece = self._rows(info, first_row + start + first, min(step, block - first))[:, columns]
                if interleaved:
                    pairs = piece.view(-1, 2, piece.shape[1]).transpose(0, 1)  # [half, pair, column]
                    halves = target.view(2, block // 2, piece.shape[1])
                    halves[:, first // 2 : first // 2 + pairs.shape[1]].copy_(pairs)
                else:
                    target[first : first + piece.shape[0]].copy_(piece)

    def _rows(self, info: TensorInfo, first: int, count: int) -> Tensor:
        """float32 [count, columns]"""
        row_bytes = _row_bytes(info)
        start = info.offset + first * row_bytes
        raw = np.frombuffer(self.file.data, dtype=np.uint8, count=count * row_bytes, offset=start)
        return torch.from_numpy(dequantize(raw.reshape(count, row_bytes), GGMLQuantizationType(info.type_number)))

    def _is_interleaved(self, info: TensorInfo) -> bool:
        return any(f".{stem}." in info.name for stem in self.interleaved)


def _check(info: TensorInfo, file: MappedFile) -> None:
    try:
        type_ = GGMLQuantizationType(info.type_number)
    except ValueError as error:
        raise ConfigError(f"{file.path}: tensor {info.name} is of unknown type {info.type_number}") from error
    block_weights, _ = GGML_QUANT_SIZES[type_]
    rows, columns = _matrix(info.shape)
    if not rows * columns or columns % block_weights:
        raise ConfigError(
            f"{file.path} is damaged: tensor {info.name} has shape {list(info.shape)} in type {type_.name}"
        )
    try:
        dequantize(np.zeros((1, _row_bytes(info)), dtype=np.uint8), type_)
    except NotImplementedError as error:
        raise ConfigError(
            f"{file.path}: tensor {info.name} is quantized as {type_.name}, which is not supported"
        ) from error
    stop = info.offset + rows * _row_bytes(info)
    if stop > file.size:
        raise ConfigError(f"{file.path} is truncated: tensor {info.name} ends at byte {stop}, the file at {file.size}")


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a vector is one row."""
    columns = shape[-1] if shape else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, columns


def _row_bytes(info: TensorInfo) -> int:
    block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_number)]
    return _matrix(info.shape)[1] // block_weights * block_bytes
