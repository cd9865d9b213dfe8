"""Weights in FP4 (e2m1): [out_features, in_features / 2] uint8, the first number of a byte in its low half.

MXFP4 (OCP Microscaling Formats 1.0): weight_scale [out_features, in_features / 32] has exponents of two, plus 127.
NVFP4: weight_scale [out_features, in_features / 16] is e4m3, and one number for the whole weight goes with it:
`weight_scale_2` (ModelOpt) multiplies, `weight_global_scale` (compressed-tensors) divides. Scales of inputs are not
needed: inputs are not quantized to 4 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.quantized import QuantFormat, QuantizedRows
from penstock_server.weights.gguf.block import half_powers
from penstock_server.weights.quantization.mxfp4 import FORMAT, GROUP
from penstock_server.weights.quantization.stored import (
    Affine,
    Headers,
    Read,
    TensorError,
    complete,
    expect,
    matrix_shape,
)

NV_GROUP = 16  # input features
# Scales become float32, in which the product of the two is as exact as the reference's.
NV_FORMAT = QuantFormat(4, NV_GROUP, number="float32", table=FORMAT.table)
MULTIPLIED, DIVIDED = "weight_scale_2", "weight_global_scale"
EXPONENTS = ("U8", "F8_E8M0")
_OF_INPUTS = ("input_scale", "input_global_scale")


@dataclass(frozen=True, slots=True)
class MxWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        packed, scales = (read(tensor, rows).view(torch.uint8) for tensor in self.tensors[:2])
        return QuantizedRows(_codes(packed), half_powers(scales).contiguous())


@dataclass(frozen=True, slots=True)
class NvWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        packed, scales, factor = self.tensors[:3]
        number = read(factor).float().reshape(())
        if not 0 < number < math.inf:
            raise TensorError(factor, f"tensor {factor} is damaged: it is {number.item()}, must be a positive number")
        each = read(scales, rows).float()
        each = each / number if factor.endswith(DIVIDED) else each * number
        return QuantizedRows(_codes(read(packed, rows)), (each / 2).contiguous())  # the table has doubled numbers


def _codes(packed: Tensor) -> Tensor:
    """[rows, bytes] uint8 → [rows, in_features] uint8"""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def fp4_weight(name: str, suffix: str, headers: Headers) -> MxWeight | NvWeight:
    """The weight whose numbers are in the tensor `name.suffix`. Raises ConfigError if it is neither MXFP4 nor NVFP4."""
    packed, scale = complete(headers, name, (f".{suffix}", ".weight_scale"))
    out_features, columns = matrix_shape(headers, packed, "U8")
    in_features = columns * 2
    of_inputs = tuple(f"{name}.{key}" for key in _OF_INPUTS if f"{name}.{key}" in headers)
    factor = next((key for key in (DIVIDED, MULTIPLIED) if f"{name}.{key}" in headers), "")
    shape = out_features, in_features
    if headers[scale].dtype in EXPONENTS and not factor:
        expect(headers, scale, (out_features, -(-in_features // GROUP)), *EXPONENTS)
        return MxWeight(name, shape, (packed, scale, *of_inputs), FORMAT)
    if not factor:
        raise TensorError(
            packed, f"the checkpoint is damaged: it has {packed}, but neither {name}.{DIVIDED} nor {name}.{MULTIPLIED}"
        )
    expect(headers, scale, (out_features, -(-in_features // NV_GROUP)), "F8_E4M3")
    if math.prod(headers[f"{name}.{factor}"].shape) != 1:
        expect(headers, f"{name}.{factor}", (), "F32")
    expect(headers, f"{name}.{factor}", headers[f"{name}.{factor}"].shape, "F32", "F16", "BF16")
    return NvWeight(name, shape, (packed, scale, f"{name}.{factor}", *of_inputs), NV_FORMAT)
