"""gpt-oss checkpoints: experts in MXFP4, the 4-bit floats of the OCP Microscaling Formats specification 1.0.

blocks [experts, out_features, groups, 16] uint8 have the codes of 32 input features, the first in the low half of a
byte; scales [experts, out_features, groups] uint8 are exponents of two, plus 127. Each expert is a weight of its own,
`name.{expert}`: only one is dequantized at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import Read, Shapes, StoredWeight, complete, expect_shape

GROUP = 32  # input features
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

    dtypes: Mapping[str, str]  # of the tensors
    name: str = "mxfp4"

    def find(self, shapes: Shapes) -> dict[str, StoredWeight]:
        found: dict[str, StoredWeight] = {}
        for tensor, shape in shapes.items():
            name = tensor.removesuffix(BLOCKS)
            if name == tensor:
                continue
            blocks, scales = complete(shapes, name, (BLOCKS, SCALES))
            num_experts, out_features, groups = shape[:3] if len(shape) == 4 else (0, 0, 0)
            expect_shape(shapes, blocks, (num_experts, out_features, groups, GROUP // 2))
            expect_shape(shapes, scales, (num_experts, out_features, groups))
            for each in (blocks, scales):
                if self.dtypes[each] != "U8":
                    raise ConfigError(f"tensor {each} is of type {self.dtypes[each]}, must be U8")
            for expert in range(num_experts):
                found[f"{name}.{expert}"] = Mxfp4Weight((out_features, groups * GROUP), (blocks, scales), expert)
        return found
