"""AWQ checkpoints (https://arxiv.org/abs/2306.00978), in the layouts of AutoAWQ.

`gemm`: qweight [in_features, out_features / 8] int32 and qzeros [groups, out_features / 8] int32 have eight outputs in
a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits; scales are [groups, out_features]. `gemv`: qweight
[out_features, in_features / 8], qzeros [out_features, words] and scales [out_features, 8 * words] have one output in a
row, in order and padded. `gemv_fast`: qweight [out_features / 4, in_features] int16; scales and scaled_zeros
[8 * words, out_features], where a weight is code * scale + scaled zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock_server.device.quantized import QuantFormat, QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import (
    FLOATS,
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
    integer_zeros,
    layout_of,
    matrix_shape,
    unpack_bits,
)

BITS = 4
LAYOUTS = ("gemm", "gemv", "gemv_fast")
KINDS = (Kind("AWQ (`gemm`, `gemv`, `gemv_fast`)", (BITS,)),)
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # place of output i among the nibbles of a word


@dataclass(frozen=True, slots=True)
class AwqWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        codes = _outputs(read(f"{self.name}.qweight"), rows)
        zeros = _outputs(read(f"{self.name}.qzeros"), rows).int()
        scales = read(f"{self.name}.scales")[:, rows.start : rows.stop].T
        return self.affine_rows(codes, scales, zeros)


def _outputs(words: Tensor, rows: range) -> Tensor:
    """[n, out_features / 8] int32 → [rows, n] uint8: these outputs."""
    words = words[:, rows.start // 8 : -(-rows.stop // 8)]
    nibbles = unpack_bits(words, BITS, words.shape[1] * 8).unflatten(1, (-1, 8))
    first = rows.start % 8
    return nibbles[:, :, PLACES].flatten(1).T[first : first + len(rows)]


@dataclass(frozen=True, slots=True)
class GemvWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        groups = self.shape[1] // self.format.group
        codes = unpack_bits(read(f"{self.name}.qweight", rows), BITS, self.shape[1])
        zeros = unpack_bits(read(f"{self.name}.qzeros", rows), BITS, groups).int()
        return self.affine_rows(codes, read(f"{self.name}.scales", rows)[:, :groups], zeros)


@dataclass(frozen=True, slots=True)
class GemvFastWeight(Affine):
    """A word of 16 bits has four codes of one output; four outputs take turns every 64 features. Implements
    `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        in_features, groups = self.shape[1], self.shape[1] // self.format.group
        fours, first = range(rows.start // 4, -(-rows.stop // 4)), rows.start % 4
        codes = unpack_bits(read(f"{self.name}.qweight", fours), BITS, in_features * 4)
        # [fours, 64s, outputs, 32s, 4, 2, 4]: the last three are the middle, lowest and highest bits of a feature.
        codes = codes.view(-1, in_features // 64, 4, 2, 4, 2, 4).permute(0, 2, 1, 3, 6, 4, 5).reshape(-1, in_features)
        scales, mins = (
            read(f"{self.name}.{numbers}")[:groups, rows.start : rows.stop].T.float().contiguous()
            for numbers in ("scales", "scaled_zeros")
        )
        return QuantizedRows(codes[first : first + len(rows)].contiguous(), scales, mins)


@dataclass(frozen=True, slots=True)
class Awq:
    """Implements `Method`."""

    group: int
    layout: str
    name: str = "awq"
    # AutoRound's groups of layers whose names start with a match, None if they are not quantized. The first match
    # counts.
    groups: tuple[tuple[re.Pattern[str], int | None], ...] = ()
    rules_option: str = ""  # that `groups` was read from

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Awq:
        bits, layout = options.get("bits", options.get("w_bit", BITS)), layout_of(options, "gemm", "version")
        if bits != BITS or layout not in LAYOUTS:
            raise ConfigError(
                f"AWQ weights of {bits} bits in the layout {layout!r} are not supported; supported are 4 bits in "
                f"{', '.join(LAYOUTS)} and marlin; {INSTEAD}"
            )
        return cls(group_size(options.get("group_size", options.get("q_group_size", 128))), layout)

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        of_layout = {"gemv": _gemv, "gemv_fast": _gemv_fast}.get(self.layout, _gemm)
        return {
            f"{name}.weight": of_layout(name, self._group_of(name), headers)
            for name, _, suffix in (tensor.rpartition(".") for tensor in headers)
            if suffix == "qweight"
        }

    def _group_of(self, name: str) -> int:
        group = next((own for names, own in self.groups if names.match(name)), self.group)
        if group is None:
            raise ConfigError(
                f"quantization_config.{self.rules_option} says that {name} is not quantized, but it has a qweight"
            )
        return group


def _gemm(name: str, group: int, headers: Headers) -> StoredWeight:
    tensors = complete(headers, name, (".qweight", ".qzeros", ".scales"))
    in_features, columns = matrix_shape(headers, tensors[0], "I32")
    format_ = _format(name, group, in_features, headers)
    groups = -(-in_features // format_.group)
    expect(headers, f"{name}.scales", (groups, columns * 8), *FLOATS)
    expect(headers, f"{name}.qzeros", (groups, columns), "I32")
    return AwqWeight(name, (columns * 8, in_features), tensors, format_)


def _gemv(name: str, group: int, headers: Headers) -> StoredWeight:
    tensors = complete(headers, name, (".qweight", ".qzeros", ".scales"))
    out_features, columns = matrix_shape(headers, tensors[0], "I32")
    format_ = _format(name, group, columns * 8, headers)
    words = _words(columns * 8, format_.group)
    expect(headers, f"{name}.scales", (out_features, words * 8), *FLOATS)
    expect(headers, f"{name}.qzeros", (out_features, words), "I32")
    return GemvWeight(name, (out_features, columns * 8), tensors, format_)


def _gemv_fast(name: str, group: int, headers: Headers) -> StoredWeight:
    tensors = complete(headers, name, (".qweight", ".scales", ".scaled_zeros"))
    fours, in_features = matrix_shape(headers, tensors[0], "I16")
    if in_features % 64:
        raise TensorError(tensors[0], f"tensor {tensors[0]} has {in_features} columns, must be a multiple of 64")
    format_ = _format(name, group, in_features, headers)
    for numbers in tensors[1:]:
        expect(headers, numbers, (_words(in_features, format_.group) * 8, fours * 4), "F16")
    return GemvFastWeight(name, (fours * 4, in_features), tensors, replace(format_, offset=0, zeros=None))


def _format(name: str, group: int, in_features: int, headers: Headers) -> QuantFormat:
    scales = headers[f"{name}.scales"].dtype
    return affine_format(name, BITS, group, in_features, zeros=integer_zeros(15), scale_dtype=scales)


def _words(in_features: int, group: int) -> int:
    """Words of zero points in a padded row: a multiple of 128 / group."""
    unit = max(1, 128 // group)
    return -(-in_features // (group * 8 * unit)) * unit
