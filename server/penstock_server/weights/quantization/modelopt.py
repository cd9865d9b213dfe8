"""Checkpoints of NVIDIA's Model Optimizer, whose tensors are those of other methods under its own names.

FP8: weight and weight_scale as in `fp8`, one, one for each output, or one for each block [rows, 1, columns, 1]. NVFP4
and MXFP4: as in `fp4`. W8A8 and W8A16: weight [out_features, in_features] int8, weight_scale [out_features]. W4A16:
weight [out_features / 2, in_features] uint8 with signed numbers of 4 bits, the first of two outputs in the low half of
a byte, and weight_scale [out_features, groups]. pre_quant_scale [in_features] multiplies inputs (AWQ, SmoothQuant);
here it multiplies the weight's columns, which is then dequantized at load. Scales of inputs are not needed.

Each weight's own tensors say what it is; `quant_algo` says which there may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock_server.device.quantized import QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.compressed_tensors import GroupOptions, find_integers
from penstock_server.weights.quantization.fp4 import EXPONENTS, fp4_weight
from penstock_server.weights.quantization.fp8 import MX_BLOCK, Block, block_size, find_scaled
from penstock_server.weights.quantization.stored import (
    FLOATS,
    INSTEAD,
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

KINDS = (
    Kind("ModelOpt: FP8, one scale, one for each output, or blocks, MXFP8, W8A8 and W8A16", (8,)),
    Kind("ModelOpt: NVFP4, MXFP4, W4A16", (4,)),
    Kind("ModelOpt: weights with a `pre_quant_scale` (AWQ, SmoothQuant)", (4, 8), is_kept=False),
)
# Values of `quant_algo`: with inputs of 8 bits of the weight's kind, and others.
_NARROW = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL")
ALGORITHMS = (
    *_NARROW,
    *("FP8_PB_WO", "FP8_PB_REAL", "MXFP8", "W8A16", "W4A16_AWQ"),
    *("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"),
)
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class PairedWeight(Affine):
    """Two outputs in a byte. Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        pairs, first = range(rows.start // 2, -(-rows.stop // 2)), rows.start % 2
        packed = read(self.tensors[0], pairs)
        codes = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1) ^ 8
        scales = read(self.tensors[1])
        scales = scales.reshape(self.shape[0], -1)[rows.start : rows.stop]
        return self.affine_rows(codes[first : first + len(rows)], scales, None)


@dataclass(frozen=True, slots=True)
class RescaledWeight:
    """A weight whose columns are multiplied by `pre_quant_scale`. Implements `StoredWeight`."""

    inner: StoredWeight
    scale: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def tensors(self) -> tuple[str, ...]:
        return *self.inner.tensors, self.scale

    def dense(self, read: Read) -> Tensor:
        return self.inner.dense(read) * read(self.scale).float()


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """Implements `Method`."""

    algorithm: str
    by_layer: Mapping[str, str]  # the algorithms of layers, if they differ
    block: Block
    name: str = "modelopt"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> ModelOpt:
        layers = options.get("quantized_layers") or {}
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise ConfigError(f"quantization_config.quantized_layers is {layers!r}, must be an object of objects")
        by_layer = {name: _algorithm(layer, f"quantized_layers[{name!r}].") for name, layer in layers.items()}
        of_all = options.get("quant_algo")
        algorithm = MIXED if by_layer or of_all in (None, MIXED) else _algorithm(options, "")
        block = options.get("weight_block_size") or [128, 128]
        return cls(algorithm, by_layer, block_size("weight_block_size", block))

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found = find_scaled(
            headers, lambda name: (self._block_of(name, headers), self._has_narrow_inputs(name, headers))
        )
        found |= find_integers(headers, lambda name: _integers(self._has_narrow_inputs(name, headers)))
        for tensor, header in headers.items():
            name, _, suffix = tensor.rpartition(".")
            if suffix == "weight" and header.dtype == "U8":
                (scale,) = complete(headers, name, (".weight", ".weight_scale"))[1:]
                is_paired = headers[scale].dtype in FLOATS
                found[tensor] = _paired(name, headers) if is_paired else fp4_weight(name, suffix, headers)
        return {tensor: _rescaled(tensor, weight, headers) for tensor, weight in found.items()}

    def _block_of(self, name: str, headers: Headers) -> Block | None:
        """Block of 8-bit floats that shares a scale: MXFP8's for exponents. None: a scale for each row, or none."""
        rows, scale = headers[f"{name}.weight"].shape[0], headers.get(f"{name}.weight_scale")
        if scale is None or scale.shape == (rows, 1):
            return None
        return MX_BLOCK if scale.dtype in EXPONENTS else self.block

    def _has_narrow_inputs(self, name: str, headers: Headers) -> bool:
        algorithm = self.by_layer.get(name, self.algorithm)
        return algorithm in _NARROW or (algorithm == MIXED and f"{name}.input_scale" in headers)


def _algorithm(options: Mapping[str, Any], where: str) -> str:
    """Raises ConfigError for an algorithm that is not supported."""
    algorithm = str(options.get("quant_algo")).upper()
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"quantization_config.{where}quant_algo is {options.get('quant_algo')!r}, which is not supported; "
            f"supported are {', '.join((*ALGORITHMS, MIXED))}; {INSTEAD}"
        )
    return algorithm


def _integers(has_narrow_inputs: bool) -> GroupOptions:
    return GroupOptions(8, -1, is_symmetric=True, has_narrow_inputs=has_narrow_inputs, block=None)


def _paired(name: str, headers: Headers) -> PairedWeight:
    tensors = complete(headers, name, (".weight", ".weight_scale"))
    pairs, in_features = matrix_shape(headers, tensors[0], "U8")
    scale = headers[tensors[1]]
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[1] else 1
    format_ = affine_format(name, 4, in_features // groups, in_features, zeros=None, scale_dtype=scale.dtype)
    expect(headers, tensors[1], (pairs * 2, groups), *FLOATS)
    of_inputs = (f"{name}.input_scale",) if f"{name}.input_scale" in headers else ()
    return PairedWeight(name, (pairs * 2, in_features), (*tensors, *of_inputs), format_)


def _rescaled(tensor: str, weight: StoredWeight, headers: Headers) -> StoredWeight:
    scale = f"{tensor.removesuffix('weight')}pre_quant_scale"
    if scale not in headers:
        return weight
    expect(headers, scale, (weight.shape[1],), *FLOATS)
    return RescaledWeight(weight, scale)
