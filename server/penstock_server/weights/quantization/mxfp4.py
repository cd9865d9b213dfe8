"""gpt-oss checkpoints: experts in MXFP4, the 4-bit floats of the OCP Microscaling Formats specification 1.0.

blocks [experts, out_features, groups, 16] uint8 have the codes of 32 input features, the first in the low half of a
byte; scales [experts, out_features, groups] uint8 are exponents of two, plus 127. Each expert is a weight of its own,
`name.{expert}`: only one is dequantized at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock_server.device.quantized import QuantFormat, QuantizedRows
from penstock_server.weights.gguf.block import MXFP4, half_powers
from penstock_server.weights.quantization.stored import (
    Affine,
    Headers,
    Kind,
    Read,
    StoredWeight,
    TensorError,
    complete,
    expect,
)

GROUP = 32  # input features
FORMAT = QuantFormat(4, GROUP, number="e8m0", table=MXFP4)
KINDS = (Kind("`mxfp4`: the experts of gpt-oss", (4,)),)
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(Affine):
    """One expert. Implements `StoredWeight`."""

    expert: int

    def rows(self, read: Read, rows: range) -> QuantizedRows:
        mine = range(self.expert, self.expert + 1)
        blocks, scales = (read(name, mine)[0, rows.start : rows.stop] for name in self.tensors)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        return QuantizedRows(codes, half_powers(scales).contiguous())


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Implements `Method`."""

    name: str = "mxfp4"

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for tensor, header in headers.items():
            name = tensor.removesuffix(BLOCKS)
            if name == tensor:
                continue
            blocks, scales = complete(headers, name, (BLOCKS, SCALES))
            if len(header.shape) != 4:
                raise TensorError(blocks, f"tensor {blocks} has shape {list(header.shape)}, must have four dimensions")
            num_experts, out_features, groups, _ = header.shape
            expect(headers, blocks, (num_experts, out_features, groups, GROUP // 2), "U8")
            expect(headers, scales, (num_experts, out_features, groups), "U8")
            for expert in range(num_experts):
                found[f"{name}.{expert}"] = Mxfp4Weight(
                    f"{name}.{expert}", (out_features, groups * GROUP), (blocks, scales), FORMAT, expert
                )
        return found
