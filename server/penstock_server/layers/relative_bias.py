"""T5's relative attention bias: a learned number for each head and each bucket of distances between query and key
(https://arxiv.org/abs/1910.10683, section 2.1). Sharded by heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


@dataclass(frozen=True, slots=True)
class RelativeBiasSpec:
    name: str  # name of the parameter; layers with one name share the table
    num_buckets: int
    max_distance: int  # larger distances share the last bucket
    is_bidirectional: bool  # half of the buckets are for keys before the query, half for keys after it

    def parameters(self, num_heads: int, heads: range) -> dict[str, Parameter]:
        return {f"{self.name}.weight": Parameter((self.num_buckets, num_heads), Part(1, heads))}

    def load(self, loader: Loader) -> Tensor:
        """[heads on this rank, 2 * max_distance + 1] float32, as `Attention.attend` takes it."""
        table = loader.read(f"{self.name}.weight")
        distances = torch.arange(-self.max_distance, self.max_distance + 1, device=table.device)
        return table.float()[self._buckets(distances)].T.contiguous()

    def _buckets(self, distances: Tensor) -> Tensor:
        """distances: position of the key minus position of the query. Small distances have a bucket each; the buckets
        of larger ones grow exponentially."""
        num_buckets = self.num_buckets
        if self.is_bidirectional:
            num_buckets //= 2
            offset, distances = (distances > 0) * num_buckets, distances.abs()
        else:
            offset, distances = torch.zeros_like(distances), -distances.clamp(max=0)
        num_exact = num_buckets // 2
        # In the order of operations of transformers: it decides where a float is close to an integer.
        powers = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(self.max_distance / num_exact)
        far = (num_exact + (powers * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
        return offset + torch.where(distances < num_exact, distances, far)
