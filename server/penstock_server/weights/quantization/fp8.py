"""Weights in 8-bit floating point with scales: Meta's `fbgemm_fp8` (one scale for each output), `fp8` with one scale
for the whole weight, and `fp8` with one for each block of it (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

They have only a dense form: a CPU has no instruction for 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import Read, Shapes, StoredWeight

FLOATS = ("F8_E4M3", "F8_E5M2")


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


def find_scaled(
    shapes: Shapes, dtypes: Mapping[str, str], block: tuple[int, int] | None = None
) -> dict[str, StoredWeight]:
    """The weights in 8-bit floats among these tensors."""
    found: dict[str, StoredWeight] = {}
    for tensor in shapes:
        name, _, suffix = tensor.rpartition(".")
        if suffix != "weight" or dtypes[tensor] not in FLOATS:
            continue
        scales = [f"{tensor}_scale{end}" for end in ("_inv", "") if f"{tensor}_scale{end}" in shapes]
        if not scales:
            raise ConfigError(f"the checkpoint is damaged: {tensor} is {dtypes[tensor]}, but has no weight_scale")
        scale = scales[0]
        of_inputs = [f"{name}.{key}" for key in ("input_scale", "input_scale_ub") if f"{name}.{key}" in shapes]
        blocks = block if scale.endswith("_inv") else None
        if blocks is not None:
            expected = tuple(-(-size // width) for size, width in zip(shapes[tensor], blocks, strict=True))
        else:
            expected = shapes[scale] if len(shapes[scale]) < 2 else (shapes[tensor][0], 1)
        if shapes[scale] != expected:
            raise ConfigError(f"tensor {scale} has shape {list(shapes[scale])}, must have {list(expected)}")
        found[tensor] = ScaledWeight(shapes[tensor], (tensor, scale, *of_inputs), blocks)
    return found


@dataclass(frozen=True, slots=True)
class Fp8:
    """Implements `Method`."""

    block: tuple[int, int] | None
    dtypes: Mapping[str, str]  # of the tensors
    name: str = "fp8"

    @classmethod
    def read(cls, options: Mapping[str, Any], dtypes: Mapping[str, str]) -> Fp8:
        block = options.get("weight_block_size")
        return cls((int(block[0]), int(block[1])) if block else None, dtypes, options["quant_method"])

    def find(self, shapes: Shapes) -> dict[str, StoredWeight]:
        return find_scaled(shapes, self.dtypes, self.block)
