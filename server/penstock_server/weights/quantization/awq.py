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
    Affine,
    Read,
    Shapes,
    StoredWeight,
    affine_format,
    affine_rows,
    complete,
    expect_shape,
    unpack_bits,
)

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of output i among the nibbles of a word


@dataclass(frozen=True, slots=True)
class AwqWeight(Affine):
    """Implements `StoredWeight`."""

    def rows(self, read: Read) -> QuantizedRows:
        codes = _outputs(read(f"{self.name}.qweight"))
        zeros = _outputs(read(f"{self.name}.qzeros")).int()
        return affine_rows(codes, read(f"{self.name}.scales").T, zeros, self.format)


def _outputs(words: Tensor) -> Tensor:
    """[n, out_features / 8] int32 → [out_features, n] uint8"""
    nibbles = unpack_bits(words, BITS, words.shape[1] * 8).unflatten(1, (-1, 8))
    return nibbles[:, :, PLACES].flatten(1).T


@dataclass(frozen=True, slots=True)
class Awq:
    """Implements `Method`."""

    group: int
    dtypes: Mapping[str, str]  # of the tensors
    name: str = "awq"

    @classmethod
    def read(cls, options: Mapping[str, Any], dtypes: Mapping[str, str]) -> Awq:
        bits, version = options.get("bits", options.get("w_bit", BITS)), str(options.get("version", "gemm")).lower()
        if bits != BITS or version != "gemm":
            raise ConfigError(
                f"AWQ weights of {bits} bits in the layout {version!r} are not supported; only 4 bits in 'gemm' are"
            )
        return cls(options.get("group_size", options.get("q_group_size", 128)), dtypes)

    def find(self, shapes: Shapes) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for tensor in shapes:
            name, _, suffix = tensor.rpartition(".")
            if suffix != "qweight":
                continue
            tensors = complete(shapes, name, (".qweight", ".qzeros", ".scales"))
            in_features, out_features = shapes[tensor][0], shapes[tensor][1] * 8
            format_ = affine_format(
                BITS, self.group, in_features, symmetric=False, scale_dtype=self.dtypes[f"{name}.scales"]
            )
            groups = -(-in_features // format_.group)
            expect_shape(shapes, f"{name}.scales", (groups, out_features))
            expect_shape(shapes, f"{name}.qzeros", (groups, out_features // 8))
            found[f"{name}.weight"] = AwqWeight(name, (out_features, in_features), tensors, format_)
        return found
