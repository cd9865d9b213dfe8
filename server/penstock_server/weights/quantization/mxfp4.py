"""gpt-oss checkpoints: experts in MXFP4, the 4-bit floats of the OCP Microscaling Formats specification 1.0.

blocks [experts, out_features, groups, 16] uint8 have the codes of 32 input features, the first in the low half of a
byte; scales [experts, out_features, groups] uint8 are exponents of two, plus 127. Each expert is a weight of its own,
`name.{expert}`: only one is dequantized at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import Headers, Kind, Read, StoredWeight, complete, expect

GROUP = 32  # input features
KINDS = (Kind("`mxfp4`: the experts of gpt-oss", (4,), is_kept=False),)
BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """One expert. Implements `StoredWeight`."""

    shape: tuple[int, int]
    tensors: tuple[str, str]  # of all experts: blocks, scales
    expert: int

    def dense(self, read: Read) -> Tensor:
        mine = range(self.expert, self.expert + 1)
        blocks, scales = (read(name, mine)[0] for name in self.tensors)
        values = torch.tensor(VALUES)
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # of every byte: low half, high half
        groups = pairs.index_select(0, blocks.flatten().int()).view(-1, GROUP)
        return torch.ldexp(groups, scales.view(-1, 1).int() - 127).view(self.shape)


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
                raise ConfigError(f"tensor {blocks} has shape {list(header.shape)}, must have four dimensions")
            num_experts, out_features, groups, _ = header.shape
            expect(headers, blocks, (num_experts, out_features, groups, GROUP // 2), "U8")
            expect(headers, scales, (num_experts, out_features, groups), "U8")
            for expert in range(num_experts):
                found[f"{name}.{expert}"] = Mxfp4Weight((out_features, groups * GROUP), (blocks, scales), expert)
        return found
