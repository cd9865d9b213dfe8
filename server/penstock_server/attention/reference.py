"""Paged attention in plain torch, on any device and in any dtype: what every other implementation is tested against.

One sequence after the other; scores and softmax in float32. Simple rather than fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock_server.attention.interface import AttentionShape, StepBatch

# Queries scored at once: bounds the score matrix of a long prompt to this many rows.
MAX_QUERY_ROWS = 256


class ReferenceAttention:
    """Cache of one layer: [2 (keys, values), blocks, block_tokens, kv_heads, head_dim]."""

    name = "reference"

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype

    def allocate(self, num_blocks: int, num_layers: int) -> list[Tensor]:
        shape = (2, num_blocks, self.shape.block_tokens, self.shape.num_kv_heads, self.shape.head_dim)
        # Filled, not `zeros`: the operating system would lend the pages of zeros only when they are first written.
        return [torch.empty(shape, dtype=self.dtype, device=self.device).fill_(0.0) for _ in range(num_layers)]

    def bytes_per_block(self) -> int:
        shape = self.shape
        return 2 * shape.block_tokens * shape.num_kv_heads * shape.head_dim * self.dtype.itemsize

    def write(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        by_slot = cache.flatten(1, 2)
        by_slot[0].index_copy_(0, slots, keys)
        by_slot[1].index_copy_(0, slots, values)

    def attend(self, queries: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        out = torch.empty_like(queries)
        starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        for sequence, context_len in enumerate(context_lens):
            start, stop = starts[sequence], starts[sequence + 1]
            num_blocks = -(-context_len // self.shape.block_tokens)
            blocks = batch.block_tables[sequence, :num_blocks].long()
            keys, values = cache[:, blocks].flatten(1, 2)[:, :context_len].float()  # each [context, kv_heads, head_dim]
            for first in range(start, stop, MAX_QUERY_ROWS):
                last = min(first + MAX_QUERY_ROWS, stop)
                num_seen = context_len - (stop - first)  # tokens before the first of these queries
                out[first:last] = self._attend_one(queries[first:last].float(), keys, values, num_seen).to(out.dtype)
        return out

    def copy_blocks(self, caches: list[Tensor], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs], device=self.device)
        targets = torch.tensor([target for _, target in pairs], device=self.device)
        for cache in caches:
            cache[:, targets] = cache[:, sources]

    def _attend_one(self, queries: Tensor, keys: Tensor, values: Tensor, num_seen: int) -> Tensor:
        """queries [rows, heads, head_dim] of one sequence, the first at position num_seen → the same shape."""
        rows, heads, dim = queries.shape
        visible = min(num_seen + rows, keys.shape[0])
        keys, values = keys[:visible], values[:visible]
        groups = queries.view(rows, self.shape.num_kv_heads, -1, dim)  # query heads by the KV head they read
        scores = torch.einsum("qghd,kgd->ghqk", groups, keys) * self.shape.scale
        positions = torch.arange(visible, device=queries.device)
        future = positions[None, :] > (num_seen + torch.arange(rows, device=queries.device))[:, None]
        weights = scores.masked_fill_(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("ghqk,kgd->qghd", weights, values).reshape(rows, heads, dim)
