"""torchao checkpoints, as transformers saves them to safetensors.

The metadata of a file names for each parameter `a.weight` the class of its tensor and the class's attributes, as JSON.
The tensors of the class are `a._weight_qdata`, `a._weight_scale` and so on. `Int8Tensor` and
`IntxUnpackedToInt8Tensor`: qdata [out_features, in_features] int8, scale and zero_point with a number for each block, a
weight is (code - zero point) * scale. `Int4Tensor`: qdata [out_features, in_features / 2], the first of two numbers in
the low half of a byte, scale and zero_point [groups, out_features], a weight is code * scale + zero point.
`Float8Tensor`: as in `fp8`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock_server.device.quantized import Number, QuantFormat, QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.fp8 import CODES, ScaledWeight, block_size
from penstock_server.weights.quantization.stored import (
    FLOATS,
    INSTEAD,
    NUMBERS,
    Affine,
    Headers,
    Kind,
    NotDownloadedError,
    Read,
    ReadMetadata,
    StoredWeight,
    affine_format,
    checked_codes,
    complete,
    expect,
    matrix_shape,
)

KINDS = (
    Kind("torchao: Int8 and Intx weights, symmetric or not, also with dynamic 8-bit inputs", (2, 3, 4, 5, 6, 8)),
    Kind("torchao: Int4 weights in the packing format `plain`", (4,)),
    Kind("torchao: Float8 weights, one scale, one for each output, or blocks", (8,)),
)
# Bits of a code in memory, for 8-bit integers in a class for 1 to 8 bits.
_KEPT_BITS = {1: 2, 7: 8}
# Reasons by refused class.
_REASONS = dict.fromkeys(
    ("Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor"),
    " (it is packed for the kernels of one device; int4_packing_format plain is not)",
)


@dataclass(frozen=True, slots=True)
class IntegerWeight(Affine):
    """`tensors` are codes, scales and maybe zero points. Implements `StoredWeight`."""

    has_zeros: bool

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        codes = (read(self.tensors[0], rows).to(torch.int16) + self.format.offset).to(torch.uint8)
        scales, zeros = read(self.tensors[1]), read(self.tensors[2]).float() if self.has_zeros else None
        mine = slice(rows.start, rows.stop)
        if scales.shape[0] != self.shape[0]:  # one for the whole weight
            scales = scales.expand(self.shape[0], -1)
            zeros = None if zeros is None else zeros.expand(self.shape[0], -1)
        zeros = None if zeros is None else zeros[mine] + self.format.offset
        return self.affine_rows(checked_codes(codes, self.format.bits, self.tensors[0]), scales[mine], zeros)


@dataclass(frozen=True, slots=True)
class PlainWeight(Affine):
    """Codes of 4 bits from -8 to 7. Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        packed = read(self.tensors[0], rows).view(torch.uint8)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1) ^ 8
        scales, zeros = (read(tensor)[:, rows.start : rows.stop].T.float() for tensor in self.tensors[1:3])
        return QuantizedRows(codes, scales.contiguous(), zeros.contiguous())


@dataclass(frozen=True, slots=True)
class Entry:
    """What the metadata says about a parameter."""

    name: str  # name of the layer
    kind: str  # the class of its tensor
    attributes: Mapping[str, Any]

    @classmethod
    def read(cls, parameter: str, text: str) -> Entry | None:
        """None for a parameter that is not quantized. Raises ConfigError if the text is not as torchao writes it."""
        try:
            value = json.loads(text)
            kind, attributes = value["_type"], value.get("_data") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            kind = attributes = None
        if not isinstance(kind, str) or not isinstance(attributes, dict):
            raise ConfigError(f"the checkpoint is damaged: its torchao metadata of {parameter} is {text[:100]!r}")
        return None if kind == "Tensor" else cls(parameter.removesuffix(".weight"), kind, attributes)

    @property
    def prefix(self) -> str:
        """Name prefix of this weight's tensors."""
        return f"{self.name}._weight_"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns that share a scale."""
        block = self.attributes.get("block_size") or list(shape)
        if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
            raise ConfigError(
                f"the checkpoint is damaged: the block_size of {self.name} is {block!r}, must be two sizes"
            )
        return min(block[0], shape[0]), min(block[1], shape[1])

    def bits(self) -> int:
        """Bits of an integer. Raises ConfigError if the class has them, but not from 1 to 8."""
        if self.kind == "Int8Tensor":
            return 8
        target = self.attributes.get("target_dtype")
        name = str(target.get("_data")) if isinstance(target, dict) else ""
        if name not in {f"int{bits}" for bits in range(1, 9)}:
            raise ConfigError(f"the checkpoint is damaged: the target_dtype of {self.name} is {target!r}")
        bits = int(name.removeprefix("int"))
        return _KEPT_BITS.get(bits, bits)

    def has_narrow_inputs(self) -> bool:
        """Whether inputs are quantized to 8 bits, around 0."""
        options = self.attributes.get("act_quant_kwargs")
        if not isinstance(options, dict):
            return False
        mapping = (options.get("_data") or {}).get("mapping_type") or {}
        return mapping.get("_data", "SYMMETRIC") == "SYMMETRIC"


@dataclass(frozen=True, slots=True)
class Torchao:
    """Implements `Method`."""

    read_tensor: Read
    read_metadata: ReadMetadata
    name: str = "torchao"

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for parameter, text in self.read_metadata().items():
            if "." not in parameter or (entry := Entry.read(parameter, text)) is None:
                continue
            kinds = {
                "Int8Tensor": self._integers,
                "IntxUnpackedToInt8Tensor": self._integers,
                "Int4Tensor": _plain,
                "Float8Tensor": _floats,
            }
            if entry.kind not in kinds or not parameter.endswith(".weight"):
                raise ConfigError(
                    f"{parameter} is a torchao {entry.kind}, which is not supported{_REASONS.get(entry.kind, '')}; "
                    f"supported are weights of linear layers as {', '.join(kinds)}; {INSTEAD}"
                )
            if f"{entry.prefix}act_pre_scale" in headers:
                raise ConfigError(f"{parameter} has a scale for its inputs (act_pre_scale), not supported; {INSTEAD}")
            found[parameter] = kinds[entry.kind](entry, headers)
        used = {tensor for weight in found.values() for tensor in weight.tensors}
        if lost := next((name for name in headers if name.endswith("_qdata") and name not in used), None):
            raise ConfigError(f"the checkpoint is damaged: it has {lost}, but no torchao metadata that describes it")
        return found

    def _integers(self, entry: Entry, headers: Headers) -> StoredWeight:
        qdata, scale = complete(headers, entry.prefix, ("qdata", "scale"))
        shape = matrix_shape(headers, qdata, "I8")
        rows, group = entry.block(shape)
        if rows not in (1, shape[0]) or shape[1] % group:
            raise ConfigError(f"{entry.name}: blocks of {rows} rows and {group} columns are not supported; {INSTEAD}")
        numbers = shape[0] // rows, shape[1] // group
        expect(headers, scale, numbers, *FLOATS)
        zero_point, has_zeros = f"{entry.prefix}zero_point", False
        tensors: tuple[str, ...] = (qdata, scale)
        if zero_point in headers:
            expect(headers, zero_point, numbers, "I8", *FLOATS)
            tensors, has_zeros = (*tensors, zero_point), self._has_zeros(zero_point)
        of_inputs = (f"{entry.prefix}act_quant_{numbers}" for numbers in ("scale", "zero_point"))
        tensors += tuple(tensor for tensor in of_inputs if tensor in headers)
        zeros: Number | None = None
        if has_zeros:
            zeros = "uint8" if headers[zero_point].dtype == "I8" else "float32"
        format_ = affine_format(
            entry.name, entry.bits(), group, shape[1], zeros=zeros, scale_dtype=headers[scale].dtype
        )
        is_narrow = entry.has_narrow_inputs() and not has_zeros and group == shape[1]
        return IntegerWeight(entry.name, shape, tensors, replace(format_, has_narrow_inputs=is_narrow), has_zeros)

    def _has_zeros(self, tensor: str) -> bool:
        """Whether a zero point is not 0: also symmetric weights have them."""
        try:
            return bool(self.read_tensor(tensor).any())
        except NotDownloadedError:
            return False


def _plain(entry: Entry, headers: Headers) -> StoredWeight:
    tensors = complete(headers, entry.prefix, ("qdata", "scale", "zero_point"))
    out_features, columns = matrix_shape(headers, tensors[0], "U8", "I8")
    shape = out_features, columns * 2
    format_ = affine_format(entry.name, 4, entry.block(shape)[1], shape[1], zeros=None, scale_dtype="F32")
    for numbers in tensors[1:]:
        expect(headers, numbers, (-(-shape[1] // format_.group), out_features), *FLOATS)
    dtypes = {headers[numbers].dtype for numbers in tensors[1:]}
    number = NUMBERS[dtypes.pop()] if len(dtypes) == 1 else "float32"
    return PlainWeight(entry.name, shape, tensors, replace(format_, has_mins=True, number=number))


def _floats(entry: Entry, headers: Headers) -> StoredWeight:
    tensors = complete(headers, entry.prefix, ("qdata", "scale"))
    shape = matrix_shape(headers, tensors[0], *CODES)
    rows, group = entry.block(shape)
    is_whole = group == shape[1]
    if not is_whole:
        rows, group = block_size("block_size", (rows, group))
    expect(headers, tensors[1], (-(-shape[0] // rows), -(-shape[1] // group)), *FLOATS)
    group = -(-group // 32) * 32 if is_whole else group
    is_narrow = entry.has_narrow_inputs() and is_whole and rows in (1, shape[0])
    format_ = QuantFormat(8, group, code=CODES[headers[tensors[0]].dtype], has_narrow_inputs=is_narrow)
    return ScaledWeight(entry.name, shape, tensors, format_, rows)
