"""Matrices as quantized checkpoints store them: small integer codes, and scales for groups of input features.

w = scale * (code - offset), with + min where a format has mins, scale * (code - zero) where groups have zero points, or
scale * table[code]. In some formats scales and mins are small integers themselves, with a common factor for each
super-group (GGUF's K types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

SUPER_GROUP = 256  # input features
Number = Literal["float16", "bfloat16", "float32", "int8", "uint4", "uint8", "e8m0"]
NUMBER_BITS: dict[Number, int] = {
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "int8": 8,
    "uint4": 4,
    "uint8": 8,
    "e8m0": 8,
}
FLOAT8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How the rows of a matrix are quantized."""

    bits: int  # bits of a code: 2 to 6, or 8
    group: int  # input features that share a scale: 16, or a multiple of 32
    offset: int = 0  # the code of zero, or of the min if there are mins; unused with zero points
    has_mins: bool = False  # or zero points
    # The type in which scales and mins are exact. If it is int8 or uint4, they have factors, which are exact in
    # float16; e8m0 are powers of two from 2^-128 on. Only zero points are uint8.
    number: Number = "float32"
    # The type in which zero points are exact, which are in the place of mins; None: they are not. Then neither they nor
    # scales have factors.
    zeros: Number | None = None
    # 16 integers of 8 bits that codes of 4 bits stand for, if not for themselves; then there is no offset and no min.
    table: tuple[int, ...] | None = None
    # What a code is: an integer, or the bits of an 8-bit float, whose format has neither offset nor mins.
    code: Literal["integer", "e4m3fn", "e5m2"] = "integer"
    # Whether the checkpoint is made for inputs in 8 bits too, of the same kind. There is one scale for each row.
    has_narrow_inputs: bool = False

    @property
    def has_factors(self) -> bool:
        """Whether scales and mins are integers."""
        return self.number in ("int8", "uint4")

    @property
    def numbers(self) -> tuple[Number, ...]:
        """The types of scales and, if there are any, of mins or zero points."""
        return (self.number, self.zeros or self.number) if self.has_mins else (self.number,)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Some rows of a matrix."""

    codes: Tensor  # [rows, in_features] uint8
    scales: Tensor  # [rows, groups] float32
    mins: Tensor | None = None  # the same; zero points, if the format has those
    scale_factors: Tensor | None = None  # [rows, super-groups] float32
    min_factors: Tensor | None = None  # the same

    @property
    def numbers(self) -> list[Tensor]:
        """Scales, and mins or zero points if there are any."""
        return [self.scales] if self.mins is None else [self.scales, self.mins]

    @property
    def factors(self) -> list[Tensor]:
        """Factors of scales and mins, if they are integers."""
        return [factors for factors in (self.scale_factors, self.min_factors) if factors is not None]

    def dequantized(self, format_: QuantFormat) -> Tensor:
        """[rows, in_features] float32"""
        num_columns = self.codes.shape[1]
        numbers = [_spread(numbers, format_.group, num_columns) for numbers in self.numbers]
        for number, factors in zip(numbers, self.factors, strict=False):
            number *= _spread(factors, SUPER_GROUP, num_columns)
        if format_.table is not None:
            return torch.tensor(format_.table, dtype=torch.float32)[self.codes.int()] * numbers[0]
        if format_.code != "integer":
            return self.codes.view(FLOAT8[format_.code]).float() * numbers[0]
        if self.mins is None:
            return (self.codes.float() - format_.offset) * numbers[0]
        if format_.zeros is not None:
            return self.codes * numbers[0] - numbers[1] * numbers[0]
        mins = numbers[1] - format_.offset * numbers[0] if format_.offset else numbers[1]
        return self.codes * numbers[0] + mins

    def select(self, rows: Tensor | slice) -> QuantizedRows:
        """These rows [n] int64, in this order."""
        return self._each(lambda tensor, _: tensor[rows])

    def narrow(self, columns: range, group: int) -> QuantizedRows:
        """These input features, which are whole groups and super-groups."""
        return self._each(
            lambda tensor, width: tensor[:, columns.start // width : -(-columns.stop // width)].contiguous(), group
        )

    def _each(self, change: Callable[[Tensor, int], Tensor], group: int = 1) -> QuantizedRows:
        """Every tensor changed, by a function of the tensor and of the input features that one of its columns has."""

        def changed(tensor: Tensor | None, width: int) -> Tensor | None:
            return None if tensor is None else change(tensor, width)

        return replace(
            self,
            codes=change(self.codes, 1),
            scales=change(self.scales, group),
            mins=changed(self.mins, group),
            scale_factors=changed(self.scale_factors, SUPER_GROUP),
            min_factors=changed(self.min_factors, SUPER_GROUP),
        )


def _spread(numbers: Tensor, width: int, num_columns: int) -> Tensor:
    """[rows, groups] → [rows, num_columns]: each number for `width` columns."""
    return numbers.repeat_interleave(width, 1)[:, :num_columns]


@dataclass(frozen=True, slots=True)
class Kept:
    """The quantized weights that operators take."""

    any: bool = True
    mixed: bool = True  # a layer with integers and 8-bit floats


ALL_KEPT = Kept()


def stays_quantized(
    weights: Sequence[tuple[QuantFormat, Tensor | None]], kept: Kept, *, is_reordered: bool = False
) -> bool:
    """Whether weights are quantized in memory as one layer, one below the other; else they are dequantized at load.

    weights: the format of each, and its order of columns as in `QuantizedMatrix`. is_reordered: the layer's rows are
    brought into another order. `Loader` and `penstock check` both ask this.
    """
    formats = {format_ for format_, _ in weights}
    orders = [order for _, order in weights]
    if not kept.any or (not kept.mixed and len({format_.code == "integer" for format_ in formats}) > 1):
        return False
    if is_reordered:
        return len(formats) == 1 and all(order is None for order in orders)
    return all(_is_same(orders[0], order) for order in orders[1:])


def _is_same(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other if order is None or other is None else torch.equal(order, other)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A rank's part of a matrix that is still in its file. It can be read once."""

    shape: tuple[int, int]  # (rows, in_features)
    format: QuantFormat
    pieces: Callable[[], Iterator[QuantizedRows]]  # all rows in order
    order: Tensor | None = None  # [in_features] int64: the input feature of each column; None: they are in order

    def dense_pieces(self) -> Iterator[Tensor]:
        """All rows, dequantized, in pieces [some rows, in_features] float32."""
        for rows in self.pieces():
            dense = rows.dequantized(self.format)
            yield dense if self.order is None else dense[:, self.order.argsort()]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and mins as they are kept in memory."""
        rows, columns = self.shape
        num_groups = -(-columns // self.format.group)
        numbers = sum(-(-num_groups * NUMBER_BITS[number] // 8) for number in self.format.numbers)
        factors = -(-columns // SUPER_GROUP) * 2 * len(self.format.numbers) if self.format.has_factors else 0
        return rows * (columns * self.format.bits // 8 + numbers + factors)

    def whole(self) -> QuantizedRows:
        """All rows, in memory."""
        return concatenated(list(self.pieces()))


def concatenated(parts: Sequence[QuantizedRows]) -> QuantizedRows:
    """The rows of all parts, which have one format."""

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        there = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(there) if there else None

    return QuantizedRows(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        joined([part.mins for part in parts]),
        joined([part.scale_factors for part in parts]),
        joined([part.min_factors for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class Dequantized:
    """Quantized matrices with the same input features, one below the other, as the dense weight that they stand for.
    Implements `LazyWeight`."""

    matrices: tuple[QuantizedMatrix, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return sum(matrix.shape[0] for matrix in self.matrices), self.matrices[0].shape[1]

    def pieces(self) -> Iterator[Tensor]:
        """Yields the rows in pieces [some rows, in_features] on the CPU."""
        for matrix in self.matrices:
            for piece in matrix.dense_pieces():
                yield piece.to(self.dtype)

    def whole(self) -> Tensor:
        """All rows, on the device."""
        weight = torch.empty(self.shape, dtype=self.dtype)
        first = 0
        for piece in self.pieces():
            weight[first : first + piece.shape[0]] = piece
            first += piece.shape[0]
        return weight.to(self.device)
