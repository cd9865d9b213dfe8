"""Checkpoints of AMD's Quark in the layouts of other methods.

fp8_e4m3: weight [out_features, in_features] and weight_scale, one or one for each output, as in `fp8`. int8: the same
with int8 weights and zero points of 0, as compressed-tensors' `int-quantized`. fp4: weight [out_features, in_features /
2] uint8, the first number of a byte in its low half, and weight_scale [out_features, in_features / 32] uint8, as MXFP4.
Scales of inputs are not needed, and those of outputs are of the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.compressed_tensors import GroupOptions, find_integers
from penstock_server.weights.quantization.fp4 import fp4_weight
from penstock_server.weights.quantization.fp8 import find_scaled
from penstock_server.weights.quantization.mxfp4 import GROUP
from penstock_server.weights.quantization.stored import INSTEAD, Headers, Kind, StoredWeight

KINDS = (Kind("Quark: FP8 and W8A8 with one scale or one for each output, MXFP4", (4, 8)),)
# By `dtype` of a weight: its `qscheme`s, and other options that it must have.
_KNOWN: Mapping[str, tuple[tuple[str, ...], Mapping[str, object]]] = {
    "fp8_e4m3": (("per_tensor", "per_channel"), {}),
    "int8": (("per_tensor", "per_channel"), {"symmetric": True}),
    "fp4": (("per_group",), {"group_size": GROUP, "scale_format": "e8m0"}),
}
_NARROW = ("fp8_e4m3", "int8")


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of the layers that a pattern names, or of all layers."""

    dtype: str  # data type of the weight; empty: it is not quantized
    has_narrow_inputs: bool

    @classmethod
    def read(cls, where: str, options: object) -> LayerOptions:
        """where: the option that they are the value of, for messages."""
        if not isinstance(options, dict):
            raise ConfigError(f"quantization_config.{where} is {options!r}, must be an object")
        weight, inputs = options.get("weight"), options.get("input_tensors")
        if not weight:
            return cls("", has_narrow_inputs=False)
        dtype = weight.get("dtype") if isinstance(weight, dict) else None
        schemes, others = _KNOWN.get(str(dtype), ((), {}))
        if not schemes or weight.get("qscheme") not in schemes or any(weight.get(key) != others[key] for key in others):
            raise ConfigError(
                f"quantization_config.{where}.weight is {weight!r}, which is not supported; supported are fp8_e4m3 and "
                f"symmetric int8, per_tensor or per_channel, and fp4 in groups of {GROUP} with scales in e8m0; "
                f"{INSTEAD}"
            )
        return cls(str(dtype), isinstance(inputs, dict) and inputs.get("dtype") in _NARROW)


@dataclass(frozen=True, slots=True)
class Quark:
    """Implements `Method`."""

    everywhere: LayerOptions
    by_pattern: Mapping[str, LayerOptions]  # the first one that matches a layer's name counts
    name: str = "quark"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Quark:
        if of_types := options.get("layer_type_quant_config"):
            raise ConfigError(
                f"quantization_config.layer_type_quant_config is {of_types!r}, which is not supported; {INSTEAD}"
            )
        layers = options.get("layer_quant_config") or {}
        if not isinstance(layers, dict):
            raise ConfigError(f"quantization_config.layer_quant_config is {layers!r}, must be an object")
        return cls(
            LayerOptions.read("global_quant_config", options.get("global_quant_config")),
            {name: LayerOptions.read(f"layer_quant_config[{name!r}]", own) for name, own in layers.items()},
        )

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found = find_scaled(headers, lambda name: (None, self._options_of(name, "fp8_e4m3").has_narrow_inputs))
        found |= find_integers(headers, self._integer_options)
        for tensor, header in headers.items():
            name, _, suffix = tensor.rpartition(".")
            if suffix == "weight" and header.dtype == "U8":
                self._options_of(name, "fp4")
                found[tensor] = fp4_weight(name, suffix, headers)
        return found

    def _integer_options(self, name: str) -> GroupOptions:
        options = self._options_of(name, "int8")
        return GroupOptions(8, -1, is_symmetric=True, has_narrow_inputs=options.has_narrow_inputs, block=None)

    def _options_of(self, name: str, dtype: str) -> LayerOptions:
        """Options of the layer `name`, whose weight is stored as `dtype`. Raises ConfigError if it should not be."""
        own = (options for pattern, options in self.by_pattern.items() if fnmatchcase(name, pattern))
        options = next(own, self.everywhere)
        if options.dtype != dtype:
            stated = options.dtype or "not quantized"
            raise ConfigError(f"{name} is stored as {dtype}, but quantization_config says that it is {stated}")
        return options
