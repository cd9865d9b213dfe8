"""Checkpoints of bitsandbytes: LLM.int8() (https://arxiv.org/abs/2208.07339) and 4-bit NF4 and FP4
(https://arxiv.org/abs/2305.14314).

int8: weight [out_features, in_features] int8 and SCB [out_features], the greatest magnitude of each row. 4 bits: weight
[bytes, 1] uint8, the first number of a byte in its high half; quant_map [16] has the values of codes; absmax has the
greatest magnitude of each block of numbers, as float32, or as codes of nested_quant_map with scales of their own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.device.quantized import QuantFormat, QuantizedRows
from penstock_server.weights.quantization.stored import (
    FLOATS,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    TensorError,
    affine_format,
    complete,
    expect,
    matrix_shape,
)

# The codebooks, by code.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4 = (*_FP4, *(-number for number in _FP4))
STATE = "quant_state.bitsandbytes__"
KINDS = (
    Kind("bitsandbytes `int8`", (8,)),
    Kind("bitsandbytes `nf4` and `fp4`, also double-quantized", (4,)),
)


@dataclass(frozen=True, slots=True)
class Int8Weight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        codes = (read(f"{self.name}.weight", rows).to(torch.int16) + 128).to(torch.uint8)
        return QuantizedRows(codes, read(f"{self.name}.SCB", rows).float()[:, None] / 127)


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """Numbers of a codebook, in blocks that are not of one row, so that there is only a dense form. Implements
    `StoredWeight`."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]

    def dense(self, read: Read) -> Tensor:
        return _dense(self.tensors, self.shape, read)


@dataclass(frozen=True, slots=True)
class TableWeight(Affine):
    """Numbers of a codebook, in rows of whole blocks. Quantized, they are rounded to a table of integers; the dense
    form is exact. Implements `StoredWeight`."""

    step: float  # step of the table

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        in_features, blocks = self.shape[1], self.shape[1] // self.format.group
        packed = read(self.tensors[0], range(rows.start * in_features // 2, rows.stop * in_features // 2)).flatten()
        codes = torch.stack([packed >> 4, packed & 15], 1).view(len(rows), in_features)
        scales = _scales(self.tensors, read).view(-1, blocks)[rows.start : rows.stop]
        return QuantizedRows(codes, (scales * self.step).contiguous())

    def dense(self, read: Read) -> Tensor:
        return _dense(self.tensors, self.shape, read)


def _dense(tensors: tuple[str, ...], shape: tuple[int, ...], read: Read) -> Tensor:
    packed = read(tensors[0]).flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: math.prod(shape)].long()
    scales = _scales(tensors, read)
    values = read(f"{tensors[0]}.quant_map")[codes]
    block = _state(tensors[1], read, is_nested=len(tensors) > 4)["blocksize"]
    return (values * scales.repeat_interleave(block)[: len(values)]).reshape(shape)


def _scales(tensors: tuple[str, ...], read: Read) -> Tensor:
    """The greatest magnitude of each block, float32."""
    name = tensors[0]
    absmax = read(f"{name}.absmax")
    if absmax.dtype != torch.uint8:
        return absmax
    state = _state(tensors[1], read, is_nested=True)
    scales = read(f"{name}.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(absmax)]
    nested: Tensor = read(f"{name}.nested_quant_map")[absmax.long()] * scales + state["nested_offset"]
    return nested


def table_of(values: npt.ArrayLike) -> tuple[tuple[int, ...], float]:
    """A codebook [16] with magnitudes up to 1 as integers of 8 bits, and the number that one of them stands for: those
    of 64 to 127 steps that leave the least greatest error. For NF4 that is 0.0021 of a block's greatest magnitude, for
    FP4 0.0018, where the codebooks' own steps are 0.08 to 0.33: it adds less than 1 % to the error of quantization."""
    exact = np.asarray(values, np.float64)
    steps = np.linspace(64, 127, 64 * 64 - 63)
    rounded = np.rint(exact * steps[:, None]) / steps[:, None]
    best = steps[np.abs(rounded - exact).max(1).argmin()]
    return tuple(np.rint(exact * best).astype(int).tolist()), 1 / float(best)


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """Implements `Method`."""

    read_state: Read
    name: str = "bitsandbytes"

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for tensor in headers:
            name, _, suffix = tensor.rpartition(".")
            if suffix != "weight":
                continue
            states = [f"{tensor}.{STATE}{kind}" for kind in ("nf4", "fp4") if f"{tensor}.{STATE}{kind}" in headers]
            if states:
                found[tensor] = self._four_bits(tensor, states[0], headers)
            elif headers[tensor].dtype == "I8":
                tensors = complete(headers, name, (".weight", ".SCB"))
                out_features, in_features = matrix_shape(headers, tensor, "I8")
                expect(headers, f"{name}.SCB", (out_features,), *FLOATS)
                if f"{name}.weight_format" in headers:
                    tensors = (*tensors, f"{name}.weight_format")
                format_ = affine_format(name, 8, -1, in_features, zeros=None, scale_dtype="F32")
                found[tensor] = Int8Weight(name, (out_features, in_features), tensors, format_)
        return found

    def _four_bits(self, tensor: str, state_name: str, headers: Headers) -> StoredWeight:
        _, absmax, quant_map = complete(headers, tensor, ("", ".absmax", ".quant_map"))
        is_nested = headers[absmax].dtype == "U8"
        state = _state(state_name, self.read_state, is_nested)
        tensors: tuple[str, ...] = (tensor, state_name, absmax, quant_map)
        expect(headers, tensor, ((math.prod(state["shape"]) + 1) // 2, 1), "U8")
        blocks = -(-math.prod(state["shape"]) // state["blocksize"])
        expect(headers, absmax, (blocks,), "F32", "U8")
        expect(headers, quant_map, (16,), "F32")
        if is_nested:
            _, nested, nested_map = complete(headers, tensor, ("", ".nested_absmax", ".nested_quant_map"))
            expect(headers, nested, (-(-blocks // state["nested_blocksize"]),), "F32")
            expect(headers, nested_map, (256,), "F32")
            tensors = (*tensors, nested, nested_map)
        shape, block = tuple(state["shape"]), state["blocksize"]
        if len(shape) != 2 or block % 32 or shape[1] % block:
            return FourBitWeight(shape, tensors)
        values = self.read_state(quant_map)
        if not bool((values.abs() <= 1).all()):
            raise TensorError(quant_map, f"tensor {quant_map} is damaged: it has values other than -1 to 1")
        table, step = table_of(values)
        return TableWeight(tensor, shape, tensors, QuantFormat(4, block, table=table), step)


def _state(name: str, read: Read, is_nested: bool) -> dict[str, Any]:
    """What a weight of 4 bits says about itself. Raises ConfigError if it lacks what is needed."""
    try:
        state: dict[str, Any] = json.loads(bytes(read(name).tolist()))
        sizes = [*state["shape"], state["blocksize"]]
        if is_nested:
            sizes.append(state["nested_blocksize"])
            float(state["nested_offset"])
        is_valid = all(type(size) is int and size > 0 for size in sizes)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TensorError(name, f"tensor {name} is damaged: {error}") from error
    if not is_valid:
        raise TensorError(name, f"tensor {name} is damaged: its sizes are {sizes}")
    return state
