"""Weights in 8-bit floating point with scales: Meta's `fbgemm_fp8` (one scale for each output), `fp8` with one scale
for the whole weight, and `fp8` with one for each block of it (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

They have only a dense form: a CPU has no instruction for 8-bit floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import FLOATS, Headers, Kind, Read, StoredWeight, expect, matrix_shape

FLOATS_OF_8_BITS = ("F8_E4M3", "F8_E5M2")
KINDS = (Kind("`fp8` (one scale, or blocks as in DeepSeek-V3), `fbgemm_fp8`", (8,), is_kept=False),)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """weight [out_features, in_features] times its scale. Implements `StoredWeight`."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]  # the weight, its scale, and what is not needed
    block: tuple[int, int] | None  # rows and columns that share a scale; None: it broadcasts

    def dense(self, read: Read) -> Tensor:
        weight, scale = read(self.tensors[0]).float(), read(self.tensors[1]).float()
        if self.block is not None:
            rows, columns = self.block
            scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            return weight * scale[: weight.shape[0], : weight.shape[1]]
        return weight * (scale.reshape(-1, 1) if scale.dim() < 2 else scale)


def find_scaled(headers: Headers, block: tuple[int, int] | None = None) -> dict[str, StoredWeight]:
    """The weights in 8-bit floats among these tensors."""
    found: dict[str, StoredWeight] = {}
    for tensor, header in headers.items():
        name, _, suffix = tensor.rpartition(".")
        if suffix != "weight" or header.dtype not in FLOATS_OF_8_BITS:
            continue
        scales = [f"{tensor}_scale{end}" for end in ("_inv", "") if f"{tensor}_scale{end}" in headers]
        if not scales:
            raise ConfigError(f"the checkpoint is damaged: {tensor} is {header.dtype}, but has no weight_scale")
        shape, scale = matrix_shape(headers, tensor, *FLOATS_OF_8_BITS), scales[0]
        of_inputs = [f"{name}.{key}" for key in ("input_scale", "input_scale_ub") if f"{name}.{key}" in headers]
        blocks = block if scale.endswith("_inv") else None
        stored = headers[scale].shape
        if blocks is not None:
            stored_for: tuple[int, ...] = (-(-shape[0] // blocks[0]), -(-shape[1] // blocks[1]))
        elif math.prod(stored) == 1:  # one for the whole weight
            stored_for = stored
        else:
            stored_for = (shape[0], 1) if len(stored) == 2 else (shape[0],)
        expect(headers, scale, stored_for, *FLOATS)
        found[tensor] = ScaledWeight(shape, (tensor, scale, *of_inputs), blocks)
    return found


@dataclass(frozen=True, slots=True)
class Fp8:
    """Implements `Method`."""

    block: tuple[int, int] | None
    name: str = "fp8"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Fp8:
        block = options.get("weight_block_size")
        return cls((int(block[0]), int(block[1])) if block else None, options["quant_method"])

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        return find_scaled(headers, self.block)
