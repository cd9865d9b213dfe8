"""T5's bias of attention scores: learned for each head and each bucket of distances between query and key, in a table
that the layers of one side share (https://arxiv.org/abs/1910.10683, section 2.1).

Sharded by heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


@dataclass(frozen=True, slots=True)
class RelativeBiasSpec:
    name: str  # of the table among the parameters
    num_buckets: int
    max_distance: int  # what is farther is in the last bucket
    both_ways: bool  # half of the buckets are for keys behind their query, half for those ahead of it

    def parameters(self, num_heads: int, heads: range) -> dict[str, Parameter]:
        return {f"{self.name}.weight": Parameter((self.num_buckets, num_heads), Part(1, heads))}

    def load(self, loader: Loader) -> Tensor:
        """[heads on this rank, 2 * max_distance + 1] float32, as `Attention.attend` takes it."""
        table = loader.read(f"{self.name}.weight")
        distances = torch.arange(-self.max_distance, self.max_distance + 1, device=table.device)
        return table.float()[self._buckets(distances)].T.contiguous()

    def _buckets(self, distances: Tensor) -> Tensor:
        """distances: how many positions a key is ahead of its query. One bucket each for the near, then buckets whose
        widths grow by powers."""
        num_buckets = self.num_buckets
        if self.both_ways:
            num_buckets //= 2
            offset, distances = (distances > 0) * num_buckets, distances.abs()
        else:
            offset, distances = torch.zeros_like(distances), -distances.clamp(max=0)
        num_near = num_buckets // 2
        # As transformers computes it: where a float is near a whole number, the order of operations decides.
        powers = torch.log(distances.clamp(min=1).float() / num_near) / math.log(self.max_distance / num_near)
        far = (num_near + (powers * (num_buckets - num_near)).long()).clamp(max=num_buckets - 1)
        return offset + torch.where(distances < num_near, distances, far)
