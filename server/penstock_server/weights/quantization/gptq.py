"""GPTQ checkpoints (https://arxiv.org/abs/2210.17323), in the layout of AutoGPTQ and GPTQModel.

qweight [in_features * bits / 32, out_features] int32 has the codes of an output below each other; qzeros [groups,
out_features * bits / 32] int32 and scales [groups, out_features] go with groups of input features, and g_idx
[in_features] says which group a feature belongs to. The first version of the format stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
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

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GptqWeight(Affine):
    """Implements `StoredWeight`."""

    has_order: bool
    zero_offset: int  # added to the stored zero points

    def order(self, read: Read) -> Tensor | None:
        groups = read(f"{self.name}.g_idx").long() if self.has_order else None
        if groups is None or bool((groups.diff() >= 0).all()):
            return None
        return groups.argsort(stable=True)

    def rows(self, read: Read) -> QuantizedRows:
        (out_features, in_features), bits = self.shape, self.format.bits
        codes = unpack_bits(read(f"{self.name}.qweight").T, bits, in_features)
        if self.has_order:
            groups = read(f"{self.name}.g_idx").long()
            num_groups = -(-in_features // self.format.group)
            expected = torch.arange(in_features) // self.format.group
            if not torch.equal(groups.sort().values, expected):
                raise ConfigError(
                    f"tensor {self.name}.g_idx is damaged: it does not say for every feature which of {num_groups} "
                    f"groups of {self.format.group} it belongs to"
                )
            order = self.order(read)
            codes = codes if order is None else codes[:, order]
        zeros = unpack_bits(read(f"{self.name}.qzeros"), bits, out_features).T.int() + self.zero_offset
        if not self.format.has_mins and not bool((zeros == self.format.offset).all()):
            raise ConfigError(f"{self.name} has zero points of its own, but the checkpoint says that it is symmetric")
        return affine_rows(codes, read(f"{self.name}.scales").T, zeros, self.format)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Implements `Method`."""

    bits: int
    group: int
    is_symmetric: bool
    zero_offset: int
    dtypes: Mapping[str, str]  # of the tensors
    name: str = "gptq"

    @classmethod
    def read(cls, options: Mapping[str, Any], dtypes: Mapping[str, str]) -> Gptq:
        bits, layout = options.get("bits"), options.get("checkpoint_format") or "gptq"
        if bits not in BITS:
            raise ConfigError(f"quantization_config.bits is {bits!r}, must be one of {', '.join(map(str, BITS))}")
        if layout not in ("gptq", "gptq_v2") or options.get("is_marlin_format"):
            raise ConfigError(
                f"GPTQ weights in the layout {layout!r} are not supported; supported are 'gptq' and 'gptq_v2'"
            )
        if options.get("dynamic"):
            raise ConfigError("quantization_config.dynamic (bits of their own for some layers) is not supported")
        group = options.get("group_size", -1)
        return cls(bits, group, bool(options.get("sym", True)), 1 if layout == "gptq" else 0, dtypes)

    def find(self, shapes: Shapes) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for tensor in shapes:
            name, _, suffix = tensor.rpartition(".")
            if suffix != "qweight":
                continue
            tensors = complete(shapes, name, (".qweight", ".qzeros", ".scales"))
            has_order = f"{name}.g_idx" in shapes
            in_features, out_features = shapes[tensor][0] * 32 // self.bits, shapes[tensor][1]
            format_ = affine_format(
                self.bits,
                self.group,
                in_features,
                symmetric=self.is_symmetric,
                scale_dtype=self.dtypes[f"{name}.scales"],
            )
            groups = -(-in_features // format_.group)
            expect_shape(shapes, f"{name}.scales", (groups, out_features))
            expect_shape(shapes, f"{name}.qzeros", (groups, out_features * self.bits // 32))
            if has_order:
                expect_shape(shapes, f"{name}.g_idx", (in_features,))
                tensors = (*tensors, f"{name}.g_idx")
            weight = GptqWeight(name, (out_features, in_features), tensors, format_, has_order, self.zero_offset)
            found[f"{name}.weight"] = weight
        return found
