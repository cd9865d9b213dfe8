"""GPTQ checkpoints (https://arxiv.org/abs/2210.17323), in the layout of AutoGPTQ and GPTQModel.

qweight [in_features * bits / 32, out_features] int32 has the codes of an output below each other; qzeros [groups,
out_features * bits / 32] int32 and scales [groups, out_features] go with groups of input features, and g_idx
[in_features] says which group a feature belongs to. The first version of the format stores zero points minus one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock_server.device.quantized import QuantizedRows
from penstock_server.errors import ConfigError
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
    feature_order,
    group_size,
    integer_zeros,
    layout_of,
    matrix_shape,
    pattern,
    unpack_bits,
)

BITS = (2, 3, 4, 8)
KINDS = (
    Kind(
        "GPTQ, both versions, symmetric or not, groups of 16 or a multiple of 32, activation order (`desc_act`), "
        "layers that differ (`dynamic`)",
        BITS,
    ),
)


@dataclass(frozen=True, slots=True)
class GptqWeight(Affine):
    """Implements `StoredWeight`."""

    has_order: bool
    zero_offsets: tuple[int, ...]  # the first is added to the stored zero points; symmetric weights may have any

    def order(self, read: Read) -> Tensor | None:
        return feature_order(f"{self.name}.g_idx", self.format.group, read) if self.has_order else None

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        (out_features, in_features), bits = self.shape, self.format.bits
        mine, order = slice(rows.start, rows.stop), self.order(read)
        codes = unpack_bits(read(f"{self.name}.qweight")[:, mine].T, bits, in_features)
        zeros = unpack_bits(read(f"{self.name}.qzeros"), bits, out_features)[:, mine].T.int()
        is_symmetric = any(bool((zeros + offset == self.format.offset).all()) for offset in self.zero_offsets)
        if not self.format.has_mins and not is_symmetric:
            raise ConfigError(f"{self.name} has zero points of its own, but the checkpoint says that it is symmetric")
        codes = codes if order is None else codes[:, order]
        return self.affine_rows(codes, read(f"{self.name}.scales")[:, mine].T, zeros + self.zero_offsets[0])


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """Options of one layer."""

    bits: int
    group: int  # -1: all input features
    is_symmetric: bool
    has_order: bool

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> GptqOptions:
        bits = options.get("bits")
        if bits not in BITS:
            raise ConfigError(f"quantization_config.bits is {bits!r}, must be one of {', '.join(map(str, BITS))}")
        group = group_size(options.get("group_size", -1))
        return cls(bits, group, bool(options.get("sym", True)), bool(options.get("desc_act", False)))


@dataclass(frozen=True, slots=True)
class Gptq:
    """Implements `Method`."""

    options: GptqOptions
    # GPTQModel's `dynamic`: the options of layers whose names start with a match, None if they are not quantized. The
    # first match counts.
    dynamic: tuple[tuple[re.Pattern[str], GptqOptions | None], ...]
    zero_offsets: tuple[int, ...]  # see `GptqWeight`
    name: str = "gptq"
    rules_option: str = "dynamic"  # that `dynamic` was read from

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Gptq:
        layout = layout_of(options, "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"GPTQ weights in the layout {layout!r} are not supported; supported are gptq, gptq_v2 and marlin; "
                f"{INSTEAD}"
            )
        dynamic = options.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise ConfigError(f"quantization_config.dynamic is {dynamic!r}, must be an object")
        rules = tuple(_rule(key, overrides, options) for key, overrides in dynamic.items())
        return cls(GptqOptions.read(options), rules, (1,) if layout == "gptq" else (0,))

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        return {
            f"{name}.weight": self._weight(name, headers)
            for name, _, suffix in (tensor.rpartition(".") for tensor in headers)
            if suffix == "qweight"
        }

    def _weight(self, name: str, headers: Headers) -> GptqWeight:
        options = next((own for names, own in self.dynamic if names.match(name)), self.options)
        if options is None:
            raise ConfigError(
                f"quantization_config.{self.rules_option} says that {name} is not quantized, but it has a qweight"
            )
        has_order = options.has_order or f"{name}.g_idx" in headers
        tensors = complete(headers, name, (".qweight", ".qzeros", ".scales", *([".g_idx"] if has_order else [])))
        rows, out_features = matrix_shape(headers, tensors[0], "I32")
        in_features = rows * 32 // options.bits
        scales = headers[f"{name}.scales"].dtype
        zeros = None if options.is_symmetric else integer_zeros((1 << options.bits) - 1 + self.zero_offsets[0])
        format_ = affine_format(name, options.bits, options.group, in_features, zeros=zeros, scale_dtype=scales)
        groups = -(-in_features // format_.group)
        expect(headers, f"{name}.scales", (groups, out_features), *FLOATS)
        expect(headers, f"{name}.qzeros", (groups, out_features * options.bits // 32), "I32")
        if has_order:
            expect(headers, f"{name}.g_idx", (in_features,), "I32", "I64")
        return GptqWeight(name, (out_features, in_features), tensors, format_, has_order, self.zero_offsets)


def _rule(key: str, overrides: object, options: Mapping[str, Any]) -> tuple[re.Pattern[str], GptqOptions | None]:
    """An entry of `dynamic`. A key that starts with `-:` is that of layers that are not quantized."""
    is_excluded = key.startswith("-:")
    names = pattern(key.removeprefix("-:" if is_excluded else "+:"))
    if is_excluded:
        return names, None
    if not isinstance(overrides, dict):
        raise ConfigError(f"quantization_config.dynamic[{key!r}] is {overrides!r}, must be an object")
    return names, GptqOptions.read({**options, **overrides})
