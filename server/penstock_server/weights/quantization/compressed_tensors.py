"""compressed-tensors checkpoints, as llm-compressor writes them.

`pack-quantized`: weight_packed [out_features, in_features * bits / 32] int32 with unsigned codes, weight_shape [2],
weight_scale [out_features, groups], for asymmetric weights weight_zero_point [out_features * bits / 32, groups] int32,
for weights in activation order weight_g_idx [in_features]. `int-quantized`: weight [out_features, in_features] int8,
weight_scale, weight_zero_point int8. `float-quantized`: as in `fp8`. Scales of inputs are not needed: inputs are
quantized by what they contain, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.kernels.quantized import QuantizedRows
from penstock_server.weights.quantization.fp8 import find_scaled
from penstock_server.weights.quantization.stored import (
    CODE_BITS,
    FLOATS,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    affine_format,
    affine_rows,
    complete,
    expect,
    feature_order,
    group_size,
    matrix_shape,
    unpack_bits,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
KINDS = (
    Kind("compressed-tensors: W4A16, W8A16 and other packed integers, W8A8", CODE_BITS, is_kept=True),
    Kind("compressed-tensors: FP8", (8,), is_kept_by_gpus_only=True),
)


@dataclass(frozen=True, slots=True)
class CompressedWeight(Affine):
    """Implements `StoredWeight`."""

    is_packed: bool
    has_zeros: bool
    has_order: bool

    def order(self, read: Read) -> Tensor | None:
        tensor = f"{self.name}.weight_g_idx"
        if not self.has_order or bool((read(tensor) < 0).any()):
            return None
        return feature_order(tensor, self.format.group, read)

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        (out_features, in_features), bits = self.shape, self.format.bits
        if self.is_packed:
            codes = unpack_bits(read(f"{self.name}.weight_packed", rows), bits, in_features)
        else:
            codes = (read(f"{self.name}.weight", rows).to(torch.int16) + 128).to(torch.uint8)
        order = self.order(read)
        codes = codes if order is None else codes[:, order]
        scales = read(f"{self.name}.weight_scale")
        scales = scales.reshape(-1, scales.shape[-1] if scales.dim() else 1)
        zeros = None
        if self.has_zeros:
            zeros = read(f"{self.name}.weight_zero_point")
            if zeros.dtype == torch.int32 and zeros.shape[0] != out_features:
                zeros = unpack_bits(zeros.T, bits, out_features).T.int()
            else:
                zeros = zeros.int() + self.format.offset
        if scales.shape[0] != out_features:  # one for the whole weight
            scales = scales.expand(out_features, -1)
            zeros = None if zeros is None else zeros.reshape(1, -1).expand(out_features, -1)
        mine = slice(rows.start, rows.stop)
        return affine_rows(codes, scales[mine], None if zeros is None else zeros[mine], self.format)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Implements `Method`."""

    bits: int
    group: int
    is_symmetric: bool
    has_narrow_inputs: bool  # of all layers
    name: str = "compressed-tensors"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> CompressedTensors:
        """Groups of layers may differ in their inputs, not in their weights."""
        found, inputs = set(), []
        for group in (options.get("config_groups") or {}).values():
            layout = group.get("format") or options.get("format") or "dense"
            if layout not in FORMATS:
                raise ConfigError(
                    f"compressed-tensors weights in the layout {layout!r} are not supported; supported are "
                    f"{', '.join(FORMATS)}"
                )
            weights = group.get("weights") or {}
            is_float = weights.get("type") == "float"
            if is_float and weights.get("num_bits", 8) != 8:
                raise ConfigError(f"floating-point weights of {weights['num_bits']} bits are not supported")
            inputs.append(group.get("input_activations") or {})
            size = weights.get("group_size") if weights.get("strategy") == "group" else -1
            found.add((8 if is_float else weights.get("num_bits", 8), size or -1, weights.get("symmetric", True)))
        if len(found) > 1:
            raise ConfigError(
                "quantization_config.config_groups has weights of several kinds, which is not supported: "
                + ", ".join(f"{bits} bits in groups of {size}" for bits, size, _ in sorted(found))
            )
        bits, size, is_symmetric = found.pop() if found else (8, -1, True)
        has_narrow_inputs = bool(inputs) and all(each.get("num_bits") == 8 for each in inputs)
        return cls(bits, group_size(size), is_symmetric, has_narrow_inputs)

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found = find_scaled(headers, has_narrow_inputs=self.has_narrow_inputs)
        for tensor in headers:
            name, _, suffix = tensor.rpartition(".")
            if suffix == "weight_packed":
                out_features, columns = matrix_shape(headers, tensor, "I32")
                in_features = columns * 32 // self.bits
                tensors: tuple[str, ...] = complete(headers, name, (".weight_packed", ".weight_scale", ".weight_shape"))
            elif suffix == "weight" and headers[tensor].dtype == "I8":
                out_features, in_features = matrix_shape(headers, tensor, "I8")
                tensors = complete(headers, name, (".weight", ".weight_scale"))
            else:
                continue
            extras = {
                each: f"{name}.{each}" in headers
                for each in ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
            }
            tensors += tuple(f"{name}.{each}" for each, is_there in extras.items() if is_there)
            has_zeros = extras["weight_zero_point"] and not self.is_symmetric
            format_ = affine_format(
                name,
                self.bits,
                self.group,
                in_features,
                symmetric=not has_zeros,
                scale_dtype=headers[f"{name}.weight_scale"].dtype,
            )
            if self.has_narrow_inputs and self.bits == 8 and self.group < 0 and not has_zeros:
                format_ = replace(format_, has_narrow_inputs=True)
            if math.prod(headers[f"{name}.weight_scale"].shape) != 1:
                groups = -(-in_features // format_.group)
                expect(headers, f"{name}.weight_scale", (out_features, groups), *FLOATS)
            shape, is_packed = (out_features, in_features), suffix == "weight_packed"
            found[f"{name}.weight"] = CompressedWeight(
                name, shape, tensors, format_, is_packed, has_zeros, extras["weight_g_idx"]
            )
        return found
