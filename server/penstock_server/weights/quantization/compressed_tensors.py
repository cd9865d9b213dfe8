"""compressed-tensors checkpoints, as llm-compressor writes them.

`pack-quantized`: weight_packed [out_features, in_features * bits / 32] int32 with unsigned codes, weight_shape [2],
weight_scale [out_features, groups], for asymmetric weights weight_zero_point [out_features * bits / 32, groups] int32,
for weights in activation order weight_g_idx [in_features], which is -1 where no order was chosen. `int-quantized`:
weight [out_features, in_features] int8, weight_scale, weight_zero_point int8. `float-quantized`: as in `fp8`.
`nvfp4-pack-quantized`, `mxfp4-pack-quantized`: as in `fp4`. Scales of inputs are not needed: inputs are quantized by
what they contain, or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock_server.device.quantized import QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.fp4 import NV_GROUP, fp4_weight
from penstock_server.weights.quantization.fp8 import block_size, find_scaled
from penstock_server.weights.quantization.mxfp4 import GROUP
from penstock_server.weights.quantization.stored import (
    CODE_BITS,
    FLOATS,
    INSTEAD,
    Affine,
    Headers,
    Kind,
    NotDownloadedError,
    Read,
    StoredWeight,
    TensorError,
    affine_format,
    complete,
    expect,
    feature_order,
    group_size,
    integer_zeros,
    matrix_shape,
    pattern,
    unpack_bits,
)

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
KINDS = (
    Kind("compressed-tensors: W4A16, W8A16 and other packed integers, W8A8, several in a model", CODE_BITS),
    Kind("compressed-tensors: FP8 and MXFP8, also in groups or blocks", (8,)),
    Kind("compressed-tensors: NVFP4 and MXFP4", (4,)),
)


# Places of transforms that the published weights contain.
_MERGED_TRANSFORMS = {"weight_input", "weight_output"}


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
        scales = scales.reshape(1 if scales.numel() == 1 else out_features, -1)
        zeros = None
        if self.has_zeros:
            zeros = read(f"{self.name}.weight_zero_point")
            if self.is_packed and zeros.dtype == torch.int32 and zeros.shape[0] == _words(out_features, bits):
                zeros = unpack_bits(zeros.T, bits, out_features).T.int()
            else:
                zeros = zeros.int() + self.format.offset
        if scales.shape[0] != out_features:  # one for the whole weight
            scales = scales.expand(out_features, -1)
            zeros = None if zeros is None else zeros.reshape(1, -1).expand(out_features, -1)
        mine = slice(rows.start, rows.stop)
        return self.affine_rows(codes, scales[mine], None if zeros is None else zeros[mine])


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of the layers of one of `config_groups`."""

    bits: int
    group: int  # see `group_size`
    is_symmetric: bool
    has_narrow_inputs: bool
    block: tuple[int, int] | None  # shape of the blocks of 8-bit floats that share a scale
    has_order: bool = False  # each weight has its `weight_g_idx`
    is_fp4: bool = False

    @classmethod
    def read(cls, options: Mapping[str, Any], layout: str) -> GroupOptions:
        """layout: of groups that do not name their own."""
        layout = options.get("format") or layout
        if layout not in FORMATS:
            raise ConfigError(
                f"compressed-tensors weights in the layout {layout!r} are not supported; supported are "
                f"{', '.join(FORMATS)}; {INSTEAD}"
            )
        weights = options["weights"]
        is_float, strategy, bits = weights.get("type") == "float", weights.get("strategy"), weights.get("num_bits", 8)
        size = weights.get("group_size")
        if is_float and (bits != 8 and (bits != 4 or size not in (NV_GROUP, GROUP))):
            raise ConfigError(
                f"floating-point weights of {bits} bits in groups of {size} are not supported; supported are 8 bits, "
                f"and 4 bits in groups of {NV_GROUP} (NVFP4) or {GROUP} (MXFP4); {INSTEAD}"
            )
        if type(bits) is not int or bits not in CODE_BITS:
            raise ConfigError(
                f"quantization_config has weights of num_bits {bits!r}, must be one of "
                f"{', '.join(map(str, CODE_BITS))}; {INSTEAD}"
            )
        block = block_size("weights.block_structure", weights.get("block_structure")) if strategy == "block" else None
        if is_float and bits == 8 and strategy == "group":
            block = block_size("weights.group_size", [1, size])
        return cls(
            bits,
            group_size(size or -1) if strategy == "group" else -1,
            weights.get("symmetric", True),
            (options.get("input_activations") or {}).get("num_bits") == 8,
            block,
            strategy == "group" and weights.get("actorder") in ("group", "dynamic"),
            is_float and bits == 4,
        )


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Implements `Method`."""

    # By what the targets of groups are. Names count first, classes of layers last.
    by_name: Mapping[str, GroupOptions]
    by_pattern: tuple[tuple[re.Pattern[str], GroupOptions], ...]
    read_tensor: Read
    name: str = "compressed-tensors"

    @classmethod
    def read(cls, options: Mapping[str, Any], read: Read) -> CompressedTensors:
        _refuse_transforms(options)
        groups = options.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ConfigError(f"quantization_config.config_groups is {groups!r}, must be an object of objects")
        targets = {
            target: GroupOptions.read(group, options.get("format") or "dense")
            for group in groups.values()
            if group.get("weights")
            for target in group.get("targets") or ["Linear"]
        }
        patterns = sorted(target for target in targets if target.startswith("re:"))
        return cls(targets, tuple((pattern(target.removeprefix("re:")), targets[target]) for target in patterns), read)

    def options_of(self, name: str) -> GroupOptions:
        """Options of the layer with this name. Raises ConfigError if no group is for it."""
        if name in self.by_name:
            return self.by_name[name]
        if found := next((options for names, options in self.by_pattern if names.match(name)), None):
            return found
        is_embedding = "embed" in name.rpartition(".")[2]
        for of_class in (["Embedding"] if is_embedding else []) + ["Linear"]:
            if of_class in self.by_name:
                return self.by_name[of_class]
        if len(set(self.by_name.values())) == 1:  # for a class that only the publisher's code has
            return next(iter(self.by_name.values()))
        raise ConfigError(
            f"{name} is quantized, but not a target of quantization_config.config_groups: {', '.join(self.by_name)}"
        )

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found = find_scaled(headers, self._float_options) | find_integers(headers, self.options_of)
        for tensor in headers:
            name, _, suffix = tensor.rpartition(".")
            if suffix == "weight_packed":
                options = self.options_of(name)
                found[f"{name}.weight"] = (
                    fp4_weight(name, suffix, headers)
                    if options.is_fp4
                    else _integers(name, suffix, options, headers, self._shape(name, options.bits, headers))
                )
        return found

    def _shape(self, name: str, bits: int, headers: Headers) -> tuple[int, int]:
        """The shape of a packed weight, whose rows end with a whole word. Raises ConfigError if it is not stored, or
        does not belong to the words."""
        packed, stored = complete(headers, name, (".weight_packed", ".weight_shape"))
        rows, words = matrix_shape(headers, packed, "I32")
        expect(headers, stored, (2,), "I32", "I64")
        try:
            out_features, in_features = map(int, self.read_tensor(stored))
        except NotDownloadedError:
            out_features, in_features = rows, words * 32 // bits
        if out_features != rows or in_features < 1 or _words(in_features, bits) != words:
            raise TensorError(
                stored,
                f"tensor {stored} says [{out_features}, {in_features}], but {packed} has {rows} rows of {words} words "
                f"of 32 bits, and a weight has {bits} bits",
            )
        return out_features, in_features

    def _float_options(self, name: str) -> tuple[tuple[int, int] | None, bool]:
        options = self.options_of(name)
        return options.block, options.has_narrow_inputs


def _refuse_transforms(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for weights that are sparse, or made for inputs that are rotated while the model runs."""
    sparsity, transforms = (options.get(key) or {} for key in ("sparsity_config", "transform_config"))
    layout = sparsity.get("format") or "dense"
    if layout != "dense":
        raise ConfigError(
            f"quantization_config.sparsity_config.format is {layout!r}, which is not supported; {INSTEAD}"
        )
    for name, scheme in (transforms.get("config_groups") or {}).items():
        places = {each.get("location") for each in scheme.get("apply") or ()} - _MERGED_TRANSFORMS
        if places:
            raise ConfigError(
                f"quantization_config.transform_config has {name} at {', '.join(sorted(map(str, places)))}, which is "
                f"not supported: only transforms that are merged into weights are; {INSTEAD}"
            )


def find_integers(headers: Headers, options_of: Callable[[str], GroupOptions]) -> dict[str, StoredWeight]:
    """The weights of 8-bit integers that are not packed. options_of: of the layer with a name."""
    found: dict[str, StoredWeight] = {}
    for tensor, header in headers.items():
        name, _, suffix = tensor.rpartition(".")
        if suffix == "weight" and header.dtype == "I8":
            found[tensor] = _integers(name, suffix, options_of(name), headers, matrix_shape(headers, tensor, "I8"))
    return found


def _words(count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` numbers of `bits` bits."""
    return -(-count * bits // 32)


def _integers(
    name: str, suffix: str, options: GroupOptions, headers: Headers, shape: tuple[int, int]
) -> CompressedWeight:
    """The weight of this shape whose codes are in the tensor `name.suffix`."""
    is_packed, (out_features, in_features) = suffix == "weight_packed", shape
    required = {
        ".weight_shape": is_packed,
        ".weight_zero_point": not options.is_symmetric,
        ".weight_g_idx": options.has_order,
    }
    optional = [suffix for suffix, is_there in required.items() if is_there]
    tensors = complete(headers, name, (f".{suffix}", ".weight_scale", *optional))
    extras = {
        each: f"{name}.{each}" in headers
        for each in ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
    }
    tensors += tuple(f"{name}.{each}" for each, is_there in extras.items() if is_there)
    scale, has_zeros = headers[f"{name}.weight_scale"], not options.is_symmetric
    zeros = integer_zeros((1 << options.bits) - 1) if has_zeros else None
    format_ = affine_format(name, options.bits, options.group, in_features, zeros=zeros, scale_dtype=scale.dtype)
    if options.has_narrow_inputs and options.bits == 8 and options.group < 0 and not has_zeros:
        format_ = replace(format_, has_narrow_inputs=True)
    groups, stored = -(-in_features // format_.group), scale.shape
    if groups > 1 or math.prod(stored) != 1:
        stored = (out_features,) if groups == 1 and len(stored) == 1 else (out_features, groups)
    expect(headers, f"{name}.weight_scale", stored, *FLOATS)
    if has_zeros:
        zero_point = f"{name}.weight_zero_point"
        words = _words(out_features, options.bits), groups
        if is_packed and headers[zero_point].shape == words and headers[zero_point].dtype == "I32":
            stored = words
        expect(headers, zero_point, stored, "I8", "I32")
    if extras["weight_g_idx"]:
        expect(headers, f"{name}.weight_g_idx", (in_features,), "I32", "I64")
    return CompressedWeight(name, shape, tensors, format_, is_packed, has_zeros, extras["weight_g_idx"])
