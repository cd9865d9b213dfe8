"""Checkpoints of bitsandbytes: LLM.int8() (https://arxiv.org/abs/2208.07339) and 4-bit NF4 and FP4
(https://arxiv.org/abs/2305.14314).

int8: weight [out_features, in_features] int8 and SCB [out_features], the greatest magnitude of each row. 4 bits: weight
[bytes, 1] uint8, the first number of a byte in its high half; quant_map [16] has the values of codes; absmax has the
greatest magnitude of each block of numbers, as float32, or as codes of nested_quant_map with scales of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.kernels.quantized import QuantizedRows
from penstock_server.weights.quantization.stored import (
    FLOATS,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    affine_format,
    complete,
    expect,
    matrix_shape,
)

STATE = "quant_state.bitsandbytes__"
KINDS = (
    Kind("bitsandbytes `int8`", (8,), is_kept=True),
    Kind("bitsandbytes `nf4` and `fp4`, also double-quantized", (4,), is_kept=False),
)


@dataclass(frozen=True, slots=True)
class Int8Weight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        codes = (read(f"{self.name}.weight", rows).to(torch.int16) + 128).to(torch.uint8)
        return QuantizedRows(codes, read(f"{self.name}.SCB", rows).float()[:, None] / 127)


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """Numbers of a codebook, which only has a dense form. Implements `StoredWeight`."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]

    def dense(self, read: Read) -> Tensor:
        name = self.tensors[0]
        state = json.loads(bytes(read(self.tensors[1]).tolist()))
        if tuple(state["shape"]) != self.shape:
            raise ConfigError(f"{name} says that its shape is {state['shape']}, config.json implies {list(self.shape)}")
        packed = read(name).flatten()
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
        absmax = read(f"{name}.absmax")
        if absmax.dtype == torch.uint8:
            scales = read(f"{name}.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = read(f"{name}.nested_quant_map")[absmax.long()] * scales + state["nested_offset"]
        values = read(f"{name}.quant_map")[codes]
        return (values * absmax.repeat_interleave(state["blocksize"])[: len(values)]).reshape(self.shape)


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
                shape = tuple(json.loads(bytes(self.read_state(states[0]).tolist()))["shape"])
                nested = [f"{tensor}.nested_{key}" for key in ("absmax", "quant_map")]
                others = complete(headers, tensor, (".absmax", ".quant_map"))
                tensors = (tensor, states[0], *others, *(each for each in nested if each in headers))
                found[tensor] = FourBitWeight(shape, tensors)
            elif headers[tensor].dtype == "I8":
                tensors = complete(headers, name, (".weight", ".SCB"))
                out_features, in_features = matrix_shape(headers, tensor, "I8")
                expect(headers, f"{name}.SCB", (out_features,), *FLOATS)
                if f"{name}.weight_format" in headers:
                    tensors = (*tensors, f"{name}.weight_format")
                format_ = affine_format(name, 8, -1, in_features, symmetric=True, scale_dtype="F32")
                found[tensor] = Int8Weight(name, (out_features, in_features), tensors, format_)
        return found
