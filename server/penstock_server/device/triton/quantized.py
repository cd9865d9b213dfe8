"""Linear layers with quantized weights on CUDA devices: packs weights as `triton_quantized_kernel` reads them, and
launches its kernels. A row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.quantized import (
    NUMBER_BITS,
    SUPER_GROUP,
    Number,
    QuantFormat,
    QuantizedMatrix,
    QuantizedRows,
)
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.narrow import NarrowSegment, is_narrow
from penstock_server.device.triton.quantized_kernel import Form, Weight, lookup_kernel, merge_kernel, product_kernel

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # words of 8 codes, by the bits of a code
_NUMBERS: dict[Number, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "uint4": torch.uint8,  # two in a byte
    "uint8": torch.uint8,
    "e8m0": torch.uint8,
}
_NARROW_OUTPUTS = 64  # outputs of a program with few rows
_SPLIT_PROGRAMS = 512  # that the splits of a layer aim at, for one tile of rows: 4 for each multiprocessor of an H200
_MAX_SPLITS = 8
_MAX_PARTIAL_BYTES = 32 << 20
_MERGED_OUTPUTS = 256  # outputs of a program


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes, and with what. The order of sums does not depend on it."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_rows: int, dtype: torch.dtype, bits: int, device: torch.device) -> Tile:
        """bits: of a code. Programs fit the 99 KiB of shared memory of compute capability 8.6."""
        if num_rows > 64 and dtype.itemsize == 2 and triton_device.shares_accumulators(device):
            return cls(64 if bits == 8 else 128, 128, 8, 2)
        if num_rows > 32 and dtype.itemsize == 2:
            return cls(_NARROW_OUTPUTS, 64, 4, 2)
        return cls(_NARROW_OUTPUTS, 16 if num_rows <= 16 else 32, 4, 3 if dtype.itemsize == 2 else 2)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive outputs of a layer whose weights have one format."""

    weight: Weight
    form: Form
    first_output: int
    bias: Tensor | None  # [outputs]
    is_gated: bool

    @classmethod
    def pack(
        cls,
        matrices: Sequence[QuantizedMatrix],
        first_output: int,
        bias: Tensor | None,
        device: torch.device,
        *,
        gated: bool,
    ) -> Segment:
        """The matrices have one format. gated: outputs become pairs of a gate and what it multiplies."""
        format_, depth = matrices[0].format, matrices[0].shape[1]
        form = _form(format_, sum(matrix.shape[0] for matrix in matrices), depth)
        weight = _zeros(form, format_, device)
        outputs = torch.arange(form.outputs, device=device)
        if gated:
            outputs = outputs % (form.outputs // 2) * 2 + outputs // (form.outputs // 2)
            bias = None if bias is None else torch.empty_like(bias).index_copy_(0, outputs, bias)
        first = 0
        for matrix in matrices:
            for rows in matrix.pieces():
                num_rows = rows.codes.shape[0]
                _fill(weight, form, format_, rows, outputs[first : first + num_rows])
                first += num_rows
        return cls(weight, form, first_output, bias, gated)

    @property
    def num_columns(self) -> int:
        """Columns of the output."""
        return self.form.outputs // 2 if self.is_gated else self.form.outputs

    @property
    def split_blocks(self) -> int:
        """Blocks of input features in a split."""
        tiles = -(-self.form.outputs // _NARROW_OUTPUTS)
        splits = max(1, min(_MAX_SPLITS, _SPLIT_PROGRAMS // tiles, self.form.blocks))
        return -(-self.form.blocks // splits)

    def apply(self, x: Tensor, y: Tensor) -> None:
        """x [rows, depth] → y [rows, num_columns]. The features of both are contiguous."""
        form, num_rows = self.form, x.shape[0]
        tile = Tile.of(num_rows, x.dtype, form.bits, x.device)
        num_splits = -(-form.blocks // self.split_blocks)
        partials = None
        if num_splits > 1 and 4 * num_splits * num_rows * form.outputs <= _MAX_PARTIAL_BYTES:
            partials = torch.empty((num_splits, num_rows, form.outputs), dtype=torch.float32, device=x.device)
        num_tiles = -(-form.outputs // tile.outputs) * -(-num_rows // tile.rows)
        triton_device.launch(
            product_kernel,
            (num_tiles, 1 if partials is None else num_splits),
            y=y,
            partials=partials,
            x=x,
            weight=self.weight,
            bias=self.bias,
            num_rows=num_rows,
            y_stride=y.stride(0),
            x_stride=x.stride(0),
            FORM=form,
            IS_GATED=self.is_gated,
            NUM_SPLITS=num_splits,
            SPLIT_BLOCKS=self.split_blocks,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            TILE_OUTPUTS=tile.outputs,
            TILE_ROWS=tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if partials is not None:
            triton_device.launch(
                merge_kernel,
                (num_rows, -(-form.outputs // _MERGED_OUTPUTS)),
                y=y,
                partials=partials,
                bias=self.bias,
                y_stride=y.stride(0),
                FORM=form,
                IS_GATED=self.is_gated,
                NUM_SPLITS=num_splits,
                TILE_OUTPUTS=_MERGED_OUTPUTS,
                num_warps=4,
            )

    def look_up(self, ids: Tensor, y: Tensor) -> None:
        """Stores those rows of the layer's weight that are in this segment."""
        triton_device.launch(
            lookup_kernel,
            (ids.shape[0], self.form.blocks),
            y=y,
            ids=ids,
            weight=self.weight,
            first_row=self.first_output,
            FORM=self.form,
            num_warps=1,
        )


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Implements `PackedLinear`."""

    segments: tuple[Segment | NarrowSegment, ...]
    out_features: int
    in_features: int
    dtype: torch.dtype  # dtype of rows that are looked up

    @classmethod
    def pack(
        cls,
        matrices: Sequence[QuantizedMatrix],
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        gated: bool = False,
    ) -> QuantizedLinear:
        """gated: as in `Ops.pack_quantized`; only if `can_gate`."""
        assert not gated or can_gate(matrices, dtype, device)
        segments: list[Segment | NarrowSegment] = []
        first = 0
        for format_, same in groupby(matrices, key=lambda matrix: matrix.format):
            group = list(same)
            end = first + sum(matrix.shape[0] for matrix in group)
            own_bias = None if bias is None else bias[first:end].to(device)
            if is_narrow(format_, (end - first, group[0].shape[1]), dtype, device):
                segments.append(NarrowSegment.pack(group, first, own_bias, device))
            else:
                segments.append(Segment.pack(group, first, own_bias, device, gated=gated))
            first = end
        out_features = sum(segment.num_columns for segment in segments)
        return cls(tuple(segments), out_features, matrices[0].shape[1], dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        y = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        for segment in self.segments:
            segment.apply(x, y[:, segment.first_output : segment.first_output + segment.num_columns])
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: [ids] int64 → [ids, in_features]. Not of gated layers."""
        y = torch.empty((ids.shape[0], self.in_features), dtype=self.dtype, device=ids.device)
        for segment in self.segments:
            segment.look_up(ids, y)
        return y


def can_gate(matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the product's kernel can compute a gate, too."""
    formats = {matrix.format for matrix in matrices}
    shape = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    return len(formats) == 1 and not is_narrow(next(iter(formats)), shape, dtype, device)


def _form(format_: QuantFormat, num_outputs: int, depth: int) -> Form:
    bits = max(width for width in _WORDS if width <= format_.bits)
    return Form(
        outputs=num_outputs,
        depth=depth,
        blocks=-(-depth // SUPER_GROUP),
        bits=bits,
        high_bits=format_.bits - bits,
        offset=format_.offset,
        group=format_.group,
        packed=32 // NUMBER_BITS[format_.number],
        number=format_.number,
        min_packed=32 // NUMBER_BITS[format_.numbers[-1]],
        min_number=format_.numbers[-1],
        has_zeros=format_.zeros is not None,
        code=format_.code,
        table=None if format_.table is None else _table_words(format_.table),
    )


def _table_words(table: tuple[int, ...]) -> tuple[int, int]:
    """The two words of `Form.table`."""
    numbers = bytes(number + 128 for number in table)
    return int.from_bytes(numbers[:8], "little", signed=True), int.from_bytes(numbers[8:], "little", signed=True)


def _zeros(form: Form, format_: QuantFormat, device: torch.device) -> Weight:
    def codes(bits: int) -> Tensor | None:
        shape = (form.blocks, form.outputs, form.unit)
        return torch.zeros(shape, dtype=_WORDS[bits], device=device) if bits else None

    def numbers(num: int, is_there: bool = True) -> Tensor | None:
        return torch.zeros((num, form.outputs), dtype=torch.int32, device=device) if is_there else None

    num_words, num_min_words = (
        -(-form.blocks * form.block // (form.group * packed)) for packed in (form.packed, form.min_packed)
    )
    return Weight(
        words=codes(form.bits),
        high_words=codes(form.high_bits),
        scales=numbers(num_words),
        mins=numbers(num_min_words, format_.has_mins),
        factors=numbers(form.blocks, format_.has_factors),
    )


def _fill(weight: Weight, form: Form, format_: QuantFormat, rows: QuantizedRows, outputs: Tensor) -> None:
    """Packs some rows as these outputs of the weight."""
    device = outputs.device
    codes = F.pad(rows.codes.to(device), (0, form.blocks * form.block - form.depth))
    units = codes.view(-1, form.blocks, form.block // form.unit, form.unit)
    for target, shift, bits in ((weight.words, 0, form.bits), (weight.high_words, form.bits, form.high_bits)):
        if target is not None:
            target.index_copy_(1, outputs, _code_words(units, shift, bits).transpose(0, 1))
    for target, numbers, number in zip((weight.scales, weight.mins), rows.numbers, format_.numbers, strict=False):
        if number == "e8m0":
            numbers = numbers.frexp().exponent + 127  # 2**n is 0.5 * 2**(n + 1)
        numbers = numbers.to(device, _NUMBERS[number])
        if number == "uint4":
            pairs = F.pad(numbers, (0, numbers.shape[1] % 2))
            numbers = pairs[:, ::2] | pairs[:, 1::2] << 4
        packed = _number_words(numbers)
        target[: packed.shape[1]].index_copy_(1, outputs, packed.t())
    if weight.factors is not None:
        # Without mins, the high half is not read.
        pairs = torch.stack([rows.factors[0], rows.factors[-1]], dim=2).to(device, torch.float16)
        weight.factors.index_copy_(1, outputs, _number_words(pairs.flatten(1)).t())


def _code_words(units: Tensor, shift: int, bits: int) -> Tensor:
    """[rows, blocks, 8, 32] uint8 → [rows, blocks, 32]: of each code, the `bits` bits from `shift` on."""
    words = torch.zeros_like(units[:, :, 0], dtype=torch.int64)
    for unit in range(units.shape[2]):
        words |= (units[:, :, unit].long() >> shift & (1 << bits) - 1) << bits * unit
    return words.to(_WORDS[bits])


def _number_words(numbers: Tensor) -> Tensor:
    """[rows, n] → [rows, words] int32: consecutive numbers, the first in the lowest bits."""
    per_word = 4 // numbers.itemsize
    return F.pad(numbers, (0, -numbers.shape[1] % per_word)).contiguous().view(torch.int32)
