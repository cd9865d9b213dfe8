"""Weights in 8-bit floating point with scales: Meta's `fbgemm_fp8` (one scale for each output), `fp8` with one scale
for the whole weight, and `fp8` with one for each block of it (DeepSeek-V3, https://arxiv.org/abs/2412.19437), which may
be an exponent of two, plus 127 (MXFP8).

Scales of inputs are not needed: where inputs are quantized too, then by what they contain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock_server.device.quantized import QuantFormat, QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.gguf.block import half_powers
from penstock_server.weights.quantization.fp4 import EXPONENTS
from penstock_server.weights.quantization.stored import (
    FLOATS,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    TensorError,
    expect,
    matrix_shape,
)

CODES: dict[str, Literal["e4m3fn", "e5m2"]] = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2"}  # by type in safetensors
_POWERS = (torch.uint8, torch.float8_e8m0fnu)
# A weight's scales and what is not needed, by the names that tools give them: transformers and DeepSeek, most others,
# Mistral, DeepSeek-V4.
_SCALES = ("weight_scale_inv", "weight_scale", "qscale_weight", "scale")
_OF_INPUTS = ("input_scale", "input_scale_ub", "activation_scale", "qscale_act", "act_scale")
KINDS = (Kind("`fp8` (one scale, or blocks as in DeepSeek-V3), `fbgemm_fp8`", (8,)),)


@dataclass(frozen=True, slots=True)
class ScaledWeight(Affine):
    """weight [out_features, in_features] times its scale. `tensors` are the weight, its scale, and what is not needed.
    Implements `StoredWeight`."""

    block_rows: int  # that share a scale

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        weight, scales = read(self.tensors[0], rows), read(self.tensors[1])
        scales = half_powers(scales.view(torch.uint8)) * 2 if scales.dtype in _POWERS else scales.float()
        scales = scales.reshape(-(-self.shape[0] // self.block_rows), -1)
        return QuantizedRows(weight.view(torch.uint8), scales[torch.arange(rows.start, rows.stop) // self.block_rows])


Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""
MX_BLOCK: Block = (1, 32)  # block of MXFP8


def find_scaled(headers: Headers, options_of: Callable[[str], tuple[Block | None, bool]]) -> dict[str, StoredWeight]:
    """The weights in 8-bit floats among these tensors. options_of: of the layer with a name, the block, and
    `has_narrow_inputs` as of `QuantFormat`, which has no effect in blocks."""
    found: dict[str, StoredWeight] = {}
    for tensor, header in headers.items():
        name, _, suffix = tensor.rpartition(".")
        if suffix != "weight" or header.dtype not in CODES:
            continue
        scales = [f"{name}.{key}" for key in _SCALES if f"{name}.{key}" in headers]
        if not scales:
            raise TensorError(tensor, f"the checkpoint is damaged: {tensor} is {header.dtype}, but has no weight_scale")
        shape, scale = matrix_shape(headers, tensor, *CODES), scales[0]
        of_inputs = [f"{name}.{key}" for key in _OF_INPUTS if f"{name}.{key}" in headers]
        (block, has_narrow_inputs), stored = options_of(name), headers[scale].shape
        group, block_rows = -(-shape[1] // 32) * 32, 1
        types = FLOATS
        if in_blocks := block is not None and len(stored) in (2, 4):
            assert block is not None
            block_rows, group = block
            blocks = -(-shape[0] // block_rows), -(-shape[1] // group)
            stored_for: tuple[int, ...] = blocks if len(stored) == 2 else (blocks[0], 1, blocks[1], 1)
            types += EXPONENTS
        elif math.prod(stored) == 1:  # one for the whole weight
            block_rows, stored_for = shape[0], stored
        else:
            stored_for = (shape[0], 1) if len(stored) == 2 else (shape[0],)
        expect(headers, scale, stored_for, *types)
        format_ = QuantFormat(8, group, code=CODES[header.dtype], has_narrow_inputs=has_narrow_inputs and not in_blocks)
        found[tensor] = ScaledWeight(name, shape, (tensor, scale, *of_inputs), format_, block_rows)
    return found


def block_size(option: str, value: object) -> Block:
    """The value of an option of `quantization_config`. Raises ConfigError if there are no kernels for such blocks."""
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if (
        len(sizes) != 2
        or any(type(size) is not int or size < 1 for size in sizes)
        or (sizes[1] != 16 and sizes[1] % 32)
    ):
        raise ConfigError(
            f"quantization_config.{option} is {value!r}, must be the rows and columns of a block: at least 1 row, and "
            "16 columns or a multiple of 32"
        )
    return sizes[0], sizes[1]


@dataclass(frozen=True, slots=True)
class Fp8:
    """Implements `Method`."""

    block: Block | None
    name: str

    @classmethod
    def read(cls, options: Mapping[str, Any], name: str) -> Fp8:
        block = options.get("weight_block_size")
        return cls(block_size("weight_block_size", block) if block else None, name)

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        return find_scaled(headers, lambda _: (self.block, True))
