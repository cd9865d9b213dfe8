"""Dequantizes tensors of a GGUF file piece by piece, or only the part that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from penstock_server.device.quantized import SUPER_GROUP, QuantizedMatrix, QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part, split_leading
from penstock_server.weights.file import WeightFile
from penstock_server.weights.finite import check_finite
from penstock_server.weights.gguf.block import FORMATS, unpack
from penstock_server.weights.gguf.header import TensorInfo

# PERF: dequantization allocates several float32 arrays of its input's size. Pieces of this many weights stay in the L2
# cache, add nothing to the peak of memory, and are so small that torch copies them without starting threads.
PIECE_WEIGHTS = 1 << 15


@dataclass(frozen=True, slots=True)
class MatrixReader:
    """Fills CPU tensors of any floating type. Reads only the rows that are asked for."""

    files: tuple[WeightFile, ...]  # all files of the model

    def vector(self, info: TensorInfo) -> Tensor:
        """A whole vector, in float32."""
        return self._rows(info, 0, 1).view(info.shape)

    def read(self, info: TensorInfo, part: Part | None, out: Tensor, interleaved: int = 0, first_row: int = 0) -> None:
        """Fills `out` with a tensor of two or more dimensions, or with a part of it.

        interleaved: the rows of a head if the two halves of each head are interleaved, else 0. A part must then consist
        of whole heads. first_row: the row at which the tensor starts, if `info` is a slice of a larger tensor.
        """
        shape = info.shape
        if len(shape) == 2:
            self._read_matrix(info, first_row, shape, part, out, interleaved)
            return
        rows = matrix_shape(shape[1:])[0]
        indexes, part = split_leading(part, shape[0])
        inner = replace(info, shape=shape[1:])
        for place, index in enumerate(indexes):
            self.read(inner, part, out[place], interleaved, first_row + index * rows)

    def _read_matrix(
        self,
        info: TensorInfo,
        first_row: int,
        shape: tuple[int, ...],
        part: Part | None,
        out: Tensor,
        interleaved: int,
    ) -> None:
        rows, columns = range(shape[0]), slice(None)
        if part is not None and part.dim == 0:
            rows = part.range
        elif part is not None:
            columns = slice(part.range.start, part.range.stop)
        # An even number of rows, so that a piece holds whole pairs of interleaved rows.
        step = max(2, PIECE_WEIGHTS // shape[1] // 2 * 2)
        # Interleaved heads are reordered one at a time.
        block = interleaved or len(rows)
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

    def quantized(
        self, info: TensorInfo, part: Part | None, interleaved: int, first_row: int = 0
    ) -> tuple[QuantizedMatrix, ...] | None:
        """A matrix, or a part of it, as it is stored; of a tensor with three dimensions, a matrix for each index of the
        first. None if its type has no codes, or the part divides a group. interleaved, first_row: as in `read`."""
        if len(info.shape) == 2:
            matrix = self._quantized_matrix(info, part, interleaved, first_row)
            return None if matrix is None else (matrix,)
        indexes, part = split_leading(part, info.shape[0])
        inner = replace(info, shape=info.shape[1:])
        rows = matrix_shape(inner.shape)[0]
        matrices = [self.quantized(inner, part, interleaved, first_row + index * rows) for index in indexes]
        return tuple(matrix for each in matrices if each is not None for matrix in each) or None

    def _quantized_matrix(
        self, info: TensorInfo, part: Part | None, interleaved: int, first_row: int
    ) -> QuantizedMatrix | None:
        format_ = FORMATS.get(GGMLQuantizationType(info.type_number))
        num_columns = info.shape[1]
        rows, columns = range(info.shape[0]), range(num_columns)
        if part is not None and part.dim == 0:
            rows = part.range
        elif part is not None:
            columns = part.range
        if format_ is None:
            return None
        group = SUPER_GROUP if format_.has_factors else format_.group
        if columns.start % group or len(columns) % group:
            return None
        step = max(1, PIECE_WEIGHTS * 8 // num_columns)
        if interleaved:
            step = max(1, step // interleaved) * interleaved

        def pieces() -> Iterator[QuantizedRows]:
            for first in range(rows.start, rows.stop, step):
                count = min(step, rows.stop - first)
                raw = self._raw(info, first_row + first, count)
                whole = unpack(torch.from_numpy(raw), GGMLQuantizationType(info.type_number))
                for numbers in (*whole.numbers, *whole.factors):
                    check_finite(numbers, numbers, info.name, self.files[info.file].path)
                if interleaved:
                    whole = whole.select(torch.arange(count).view(-1, interleaved // 2, 2).transpose(1, 2).flatten())
                yield whole if len(columns) == num_columns else whole.narrow(columns, format_.group)

        return QuantizedMatrix((len(rows), len(columns)), format_, pieces)

    def _rows(self, info: TensorInfo, first: int, count: int) -> Tensor:
        """Dequantized rows: float32 [count, columns]."""
        return torch.from_numpy(dequantize(self._raw(info, first, count), GGMLQuantizationType(info.type_number)))

    def _raw(self, info: TensorInfo, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Rows as they are stored: [count, bytes of a row]."""
        row_bytes = _row_bytes(info)
        raw = np.empty((count, row_bytes), dtype=np.uint8)
        self.files[info.file].read_into(raw.data.cast("B"), info.offset + first * row_bytes)
        return raw


def check_tensor(info: TensorInfo, file: WeightFile) -> None:
    """Raises ConfigError when the tensor's type or shape is not supported, or it ends beyond the file."""
    try:
        type_ = GGMLQuantizationType(info.type_number)
    except ValueError as error:
        raise ConfigError(f"{file.path}: tensor {info.name} is of unknown type {info.type_number}") from error
    block_weights, block_bytes = GGML_QUANT_SIZES[type_]
    rows, columns = matrix_shape(info.shape)
    if not rows * columns or columns % block_weights:
        raise ConfigError(
            f"{file.path} is damaged: tensor {info.name} has shape {list(info.shape)} in type {type_.name}"
        )
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_)
    except NotImplementedError as error:
        raise ConfigError(
            f"{file.path}: tensor {info.name} is quantized as {type_.name}, which is not supported"
        ) from error
    stop = info.offset + num_bytes(info)
    if stop > file.size:
        raise ConfigError(f"{file.path} is truncated: tensor {info.name} ends at byte {stop}, the file at {file.size}")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (rows, columns) of a tensor seen as one matrix; a vector is one row."""
    columns = shape[-1] if shape else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, columns


def num_bytes(info: TensorInfo) -> int:
    """The size of the tensor in its file."""
    return matrix_shape(info.shape)[0] * _row_bytes(info)


def _row_bytes(info: TensorInfo) -> int:
    block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_number)]
    return matrix_shape(info.shape)[1] // block_weights * block_bytes


def dequantized_types(infos: Iterable[TensorInfo]) -> list[str]:
    """The quantized types among these tensors that no kernel reads, by name."""
    types = {GGMLQuantizationType(info.type_number) for info in infos}
    return sorted(type_.name for type_ in types if type_ not in FORMATS and GGML_QUANT_SIZES[type_][0] > 1)
