"""AWQ checkpoints (https://arxiv.org/abs/2306.00978), in AutoAWQ's `gemm` layout.

qweight [in_features, out_features / 8] int32 and qzeros [groups, out_features / 8] int32 have eight outputs in a word,
in the order 0 2 4 6 1 3 5 7 from the lowest bits; scales are [groups, out_features].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.kernels.quantized import QuantizedRows
from penstock_server.weights.quantization.stored import (
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
    group_size,
    matrix_shape,
    unpack_bits,
)

BITS = 4
KINDS = (Kind("AWQ (`gemm`)", (BITS,), is_kept=True),)
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of output i among the nibbles of a word


@dataclass(frozen=True, slots=True)
class AwqWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        codes = _outputs(read(f"{self.name}.qweight"), rows)
        zeros = _outputs(read(f"{self.name}.qzeros"), rows).int()
        scales = read(f"{self.name}.scales")[:, rows.start : rows.stop].T
        return affine_rows(codes, scales, zeros, self.format)


def _outputs(words: Tensor, rows: range) -> Tensor:
    """[n, out_features / 8] int32 → [rows, n] uint8: these outputs."""
    words = words[:, rows.start // 8 : -(-rows.stop // 8)]
    nibbles = unpack_bits(words, BITS, words.shape[1] * 8).unflatten(1, (-1, 8))
    first = rows.start % 8
    return nibbles[:, :, PLACES].flatten(1).T[first : first + len(rows)]


@dataclass(frozen=True, slots=True)
class Awq:
    """Implements `Method`."""

    group: int
    name: str = "awq"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Awq:
        bits, version = options.get("bits", options.get("w_bit", BITS)), str(options.get("version", "gemm")).lower()
        if bits != BITS or version != "gemm":
            raise ConfigError(
                f"AWQ weights of {bits} bits in the layout {version!r} are not supported; only 4 bits in 'gemm' are"
            )
        return cls(group_size(options.get("group_size", options.get("q_group_size", 128))))

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        return {
            f"{name}.weight": self._weight(name, headers)
            for name, _, suffix in (tensor.rpartition(".") for tensor in headers)
            if suffix == "qweight"
        }

    def _weight(self, name: str, headers: Headers) -> AwqWeight:
        tensors = complete(headers, name, (".qweight", ".qzeros", ".scales"))
        in_features, columns = matrix_shape(headers, tensors[0], "I32")
        scales = headers[f"{name}.scales"].dtype
        format_ = affine_format(name, BITS, self.group, in_features, symmetric=False, scale_dtype=scales)
        groups = -(-in_features // format_.group)
        expect(headers, f"{name}.scales", (groups, columns * 8), *FLOATS)
        expect(headers, f"{name}.qzeros", (groups, columns), "I32")
        return AwqWeight(name, (columns * 8, in_features), tensors, format_)
