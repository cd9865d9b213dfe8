"""HQQ checkpoints (https://mobiusml.github.io/hqq_blog/), in the layout of the package `hqq`.

A weight [out_features, in_features] is seen as [groups, group_size] if `axis` is 1, else as [group_size, groups], and
W_q has its codes, packed along the first dimension: of n rows, the codes of row i, i + n, i + 2n... are in one item,
the first one in the highest bits. scale and zero have a number for each group; a weight is (code - zero) * scale, and
zero is not rounded. Scalars next to them say what the layer is: nbits, axis, group_size, shape and others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.quantized import QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import (
    FLOATS,
    INSTEAD,
    NUMBERS,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    TensorError,
    affine_format,
    checked_codes,
    complete,
    expect,
)

BITS = (1, 2, 3, 4, 5, 6, 8)
KINDS = (
    Kind("HQQ with `axis` 1, in groups of 16, of a multiple of 32, or of rows", BITS),
    Kind("HQQ with `axis` 0, or in other groups", BITS, is_kept=False),
)
# By the bits of a code: its bits in W_q, how many codes an item has, and the item's type.
_PACKING = {1: (1, 8, "U8"), 2: (2, 4, "U8"), 3: (3, 10, "I32"), 4: (4, 2, "U8")}
_WHOLE = (8, 1, "U8")
_PARTS = ("W_q", "scale", "zero", "nbits", "axis", "group_size", "shape")
_OTHERS = (
    *("packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
# What a layer must not be, by the scalar that says so or the tensor that it has then.
_REFUSED = {
    "view_as_float": "codes stored as floats",
    "quant_scale": "quantized scales",
    "quant_zero": "quantized zeros",
}


@dataclass(frozen=True, slots=True)
class Codes:
    """W_q of a layer."""

    tensor: str
    bits: int

    def read(self, read: Read, rows: range) -> Tensor:
        """These rows of the matrix that was packed, uint8."""
        packed = read(self.tensor)
        bits, num_parts, _ = _PACKING.get(self.bits, _WHOLE)
        part, item = (
            torch.arange(rows.start, rows.stop) // len(packed),
            torch.arange(rows.start, rows.stop) % len(packed),
        )
        codes = packed[item] >> ((num_parts - 1 - part) * bits).to(packed.dtype)[:, None] & (1 << bits) - 1
        return checked_codes(codes.to(torch.uint8), self.bits, self.tensor)


@dataclass(frozen=True, slots=True)
class GroupedWeight(Affine):
    """Groups of input features. Implements `StoredWeight`."""

    codes: Codes
    num_groups: int  # groups of a row

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        groups = range(rows.start * self.num_groups, rows.stop * self.num_groups)
        scales, zeros = (read(tensor, groups).view(len(rows), self.num_groups).float() for tensor in self.tensors[1:3])
        return self.affine_rows(self.codes.read(read, groups).view(len(rows), self.shape[1]), scales, zeros)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Groups that the kernels do not have, so that there is only a dense form. Implements `StoredWeight`."""

    shape: tuple[int, int]
    tensors: tuple[str, ...]
    codes: Codes
    num_rows: int  # rows of the matrix that was packed

    def dense(self, read: Read) -> Tensor:
        scales, zeros = (read(tensor).float() for tensor in self.tensors[1:3])
        return ((self.codes.read(read, range(self.num_rows)) - zeros) * scales).view(self.shape)


@dataclass(frozen=True, slots=True)
class Hqq:
    """Implements `Method`."""

    read_tensor: Read
    name: str = "hqq"

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        return {
            f"{name}.weight": self._weight(name, headers)
            for name, _, suffix in (tensor.rpartition(".") for tensor in headers)
            if suffix == "W_q"
        }

    def _weight(self, name: str, headers: Headers) -> StoredWeight:
        for part, what in _REFUSED.items():
            if f"{name}.{part}" in headers and self._scalar(f"{name}.{part}", headers):
                raise ConfigError(f"{name}: HQQ weights with {what} are not supported; {INSTEAD}")
        if f"{name}.zero_scale" in headers:
            raise ConfigError(f"{name}: HQQ weights saved with offload_meta are not supported; {INSTEAD}")
        tensors = complete(headers, name, tuple(f".{part}" for part in _PARTS))
        nbits, axis, group = (self._scalar(tensor, headers) for tensor in tensors[3:6])
        shape = self._shape(tensors[6], headers)
        bits = 2 if 1 < nbits < 2 else int(nbits)  # 1.58 bits are three codes
        if bits not in BITS or axis not in (0, 1) or not 1 <= group <= math.prod(shape) or math.prod(shape) % group:
            raise ConfigError(
                f"{name}: HQQ weights of {nbits:g} bits with axis {axis:g} in groups of {group:g} of {math.prod(shape)}"
                f" are not supported; supported are {', '.join(map(str, BITS))} bits, axis 0 or 1; {INSTEAD}"
            )
        group, num_groups = int(group), math.prod(shape) // int(group)
        rows, columns = (num_groups, group) if axis == 1 else (group, num_groups)
        _, num_parts, dtype = _PACKING.get(bits, _WHOLE)
        expect(headers, tensors[0], (-(-rows // num_parts), columns), dtype)
        for numbers in tensors[1:3]:
            expect(headers, numbers, (rows, 1) if axis == 1 else (1, columns), *FLOATS)
        tensors += tuple(f"{name}.{part}" for part in _OTHERS if f"{name}.{part}" in headers)
        codes, in_features = Codes(tensors[0], bits), shape[1]
        if axis == 0 or in_features % group or (group not in (16, in_features) and group % 32):
            return DenseWeight(shape, tensors, codes, rows)
        scale_dtype, zeros = headers[tensors[1]].dtype, NUMBERS[headers[tensors[2]].dtype]
        format_ = affine_format(name, max(2, bits), group, in_features, zeros=zeros, scale_dtype=scale_dtype)
        return GroupedWeight(name, shape, tensors, format_, codes, in_features // group)

    def _scalar(self, tensor: str, headers: Headers) -> float:
        expect(headers, tensor, (), "I32", "I64", "F32", "U8")
        value = float(self.read_tensor(tensor))
        if not math.isfinite(value):
            raise TensorError(tensor, f"tensor {tensor} is damaged: it is {value}")
        return value

    def _shape(self, tensor: str, headers: Headers) -> tuple[int, int]:
        expect(headers, tensor, (2,), "I64", "I32")
        out_features, in_features = map(int, self.read_tensor(tensor))
        if min(out_features, in_features) < 1:
            raise TensorError(tensor, f"tensor {tensor} says [{out_features}, {in_features}], must be at least 1 by 1")
        return out_features, in_features
