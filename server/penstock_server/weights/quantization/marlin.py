"""GPTQ and AWQ checkpoints that are packed for the kernel Marlin (https://arxiv.org/abs/2408.11743).

Codes [in_features / 16, out_features * 2] int32 are 4 bits around 8, in the order in which a GPU's threads multiply
them; scales are [groups, out_features], in the order of the results. There are no zero points and no activation order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock_server.device.quantized import QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import (
    INSTEAD,
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    TensorError,
    affine_format,
    complete,
    expect,
    group_size,
    layout_of,
    matrix_shape,
    unpack_bits,
)

BITS = 4
KINDS = (Kind("GPTQ and AWQ packed for Marlin", (BITS,)),)
_TENSORS = {"gptq": (".B", ".s"), "awq": (".qweight", ".scales")}


@dataclass(frozen=True, slots=True)
class MarlinWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        (out_features, in_features), (packed, scales) = self.shape, self.tensors[:2]
        # 64 outputs are together in memory.
        first, last = rows.start // 64, -(-rows.stop // 64)
        words = read(packed)[:, first * 128 : last * 128]
        codes = unpack_bits(words, BITS, words.shape[1] * 8)
        # [16s of features, 64s of outputs, 8 outputs, 4 pairs of features, 4 times 16 outputs, 2 features, 2 times 8
        # outputs, 2 times 8 features]
        codes = codes.view(-1, last - first, 8, 4, 4, 2, 2, 2).permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(-1, in_features)
        numbers = read(scales)
        if numbers.shape[0] > 1:
            numbers = numbers.view(-1, out_features // 64, 8, 8).transpose(2, 3)
        else:
            numbers = numbers.view(-1, out_features // 32, 4, 4, 2).transpose(2, 3)
        mine = slice(rows.start - first * 64, rows.stop - first * 64)
        numbers = numbers.reshape(-1, out_features)[:, rows.start : rows.stop].T
        return self.affine_rows(codes[mine], numbers, None)


def is_marlin(options: Mapping[str, Any]) -> bool:
    """options: `quantization_config` of GPTQ or AWQ."""
    return bool(options.get("is_marlin_format")) or layout_of(options, "", "version") == "marlin"


@dataclass(frozen=True, slots=True)
class Marlin:
    """Implements `Method`."""

    group: int
    name: str  # gptq or awq

    @classmethod
    def read(cls, options: Mapping[str, Any], name: str) -> Marlin:
        bits = options.get("bits", BITS)
        if bits != BITS or options.get("desc_act") or options.get("zero_point"):
            raise ConfigError(
                f"weights of {bits} bits packed for Marlin, with desc_act={options.get('desc_act')} and zero_point="
                f"{options.get('zero_point')}, are not supported; supported are 4 bits without either; {INSTEAD}"
            )
        return cls(group_size(options.get("group_size", -1)), name)

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        suffixes = _TENSORS[self.name]
        names = [tensor.removesuffix(suffixes[0]) for tensor in headers if tensor.endswith(suffixes[0])]
        return {f"{name}.weight": self._weight(name, suffixes, headers) for name in names}

    def _weight(self, name: str, suffixes: tuple[str, ...], headers: Headers) -> MarlinWeight:
        tensors = complete(headers, name, suffixes)
        rows, columns = matrix_shape(headers, tensors[0], "I32")
        out_features, in_features = columns // 2, rows * 16
        if columns % 128:
            raise TensorError(tensors[0], f"tensor {tensors[0]} has {columns} columns, must be a multiple of 128")
        format_ = affine_format(name, BITS, self.group, in_features, zeros=None, scale_dtype=headers[tensors[1]].dtype)
        expect(headers, tensors[1], (-(-in_features // format_.group), out_features), "F16")
        if f"{name}.workspace" in headers:
            tensors = (*tensors, f"{name}.workspace")
        return MarlinWeight(name, (out_features, in_features), tensors, format_)
