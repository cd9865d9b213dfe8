"""Weights in 8-bit floating point with scales: Meta's `fbgemm_fp8` (one scale for each output), `fp8` with one scale
for the whole weight, and `fp8` with one for each block of it (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

Scales of inputs are not needed: where inputs are quantized too, then by what they contain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock_server.errors import ConfigError
from penstock_server.kernels.quantized import QuantFormat, QuantizedRows
from penstock_server.weights.quantization.stored import (
    FLOATS,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    expect,
    matrix_shape,
)

CODES: dict[str, Literal["e4m3fn", "e5m2"]] = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2"}  # by type in safetensors
KINDS = (Kind("`fp8` (one scale, or blocks as in DeepSeek-V3), `fbgemm_fp8`", (8,), is_kept_by_gpus_only=True),)


@dataclass(frozen=True, slots=True)
class ScaledWeight(Affine):
    """weight [out_features, in_features] times its scale. `tensors` are the weight, its scale, and what is not needed.
    Implements `StoredWeight`."""

    block_rows: int  # that share a scale

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        weight, scales = read(self.tensors[0], rows), read(self.tensors[1]).float()
        scales = scales.reshape(-(-self.shape[0] // self.block_rows), -1)
        return QuantizedRows(weight.view(torch.uint8), scales[torch.arange(rows.start, rows.stop) // self.block_rows])


def find_scaled(
    headers: Headers, block: tuple[int, int] | None = None, *, has_narrow_inputs: bool
) -> dict[str, StoredWeight]:
    """The weights in 8-bit floats among these tensors. has_narrow_inputs: as of `QuantFormat`, except in blocks."""
    found: dict[str, StoredWeight] = {}
    for tensor, header in headers.items():
        name, _, suffix = tensor.rpartition(".")
        if suffix != "weight" or header.dtype not in CODES:
            continue
        scales = [f"{tensor}_scale{end}" for end in ("_inv", "") if f"{tensor}_scale{end}" in headers]
        if not scales:
            raise ConfigError(f"the checkpoint is damaged: {tensor} is {header.dtype}, but has no weight_scale")
        shape, scale = matrix_shape(headers, tensor, *CODES), scales[0]
        of_inputs = [f"{name}.{key}" for key in ("input_scale", "input_scale_ub") if f"{name}.{key}" in headers]
        stored = headers[scale].shape
        in_blocks = block is not None and scale.endswith("_inv")
        group, block_rows = -(-shape[1] // 32) * 32, 1
        if block is not None and in_blocks:
            block_rows, group = block
            stored_for: tuple[int, ...] = (-(-shape[0] // block_rows), -(-shape[1] // group))
        elif math.prod(stored) == 1:  # one for the whole weight
            block_rows, stored_for = shape[0], stored
        else:
            stored_for = (shape[0], 1) if len(stored) == 2 else (shape[0],)
        expect(headers, scale, stored_for, *FLOATS)
        format_ = QuantFormat(8, group, code=CODES[header.dtype], has_narrow_inputs=has_narrow_inputs and not in_blocks)
        found[tensor] = ScaledWeight(name, shape, (tensor, scale, *of_inputs), format_, block_rows)
    return found


@dataclass(frozen=True, slots=True)
class Fp8:
    """Implements `Method`."""

    block: tuple[int, int] | None
    name: str = "fp8"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Fp8:
        block = options.get("weight_block_size")
        if not block:
            return cls(None, options["quant_method"])
        rows, columns = block
        if columns != 16 and columns % 32:
            raise ConfigError(
                f"quantization_config.weight_block_size is {block}; blocks must have 16 columns, or a multiple of 32"
            )
        return cls((rows, columns), options["quant_method"])

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        return find_scaled(headers, self.block, has_narrow_inputs=True)
