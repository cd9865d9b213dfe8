"""Paged attention in plain torch, on any device and in any dtype: what every other implementation is tested against.

One sequence after the other; scores and softmax in float32. Simple rather than fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.attention.interface import Alibi, AttentionShape, StepBatch

# Queries scored at once: bounds the score matrix of a long prompt to this many rows.
MAX_QUERY_ROWS = 256


class ReferenceAttention:
    """Cache of one layer: [blocks, block_tokens, kv_heads, head_dim + value_dim], keys first."""

    name = "reference"

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.stored_dim = shape.head_dim + (0 if shape.values_in_keys else shape.result_dim)

    def allocate(self, num_blocks: int, num_layers: int) -> list[Tensor]:
        shape = (num_blocks, self.shape.block_tokens, self.shape.num_kv_heads, self.stored_dim)
        # Filled, not `zeros`: the operating system would lend the pages of zeros only when they are first written.
        return [torch.empty(shape, dtype=self.dtype, device=self.device).fill_(0.0) for _ in range(num_layers)]

    def bytes_per_block(self) -> int:
        return self.shape.block_tokens * self.shape.num_kv_heads * self.stored_dim * self.dtype.itemsize

    def write(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        by_slot = cache.flatten(0, 1)
        stored = keys if self.shape.values_in_keys else torch.cat([keys, values], dim=-1)
        by_slot.index_copy_(0, slots, stored)

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        batch: StepBatch,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        shape = self.shape
        out = queries.new_empty((queries.shape[0], shape.num_heads, shape.result_dim))
        starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        source_lens = [0] * len(context_lens) if batch.source_lens is None else batch.source_lens.tolist()
        for sequence, context_len in enumerate(context_lens):
            start, stop = starts[sequence], starts[sequence + 1]
            if start == stop:
                continue
            positions = torch.arange(context_len - (stop - start), context_len, device=queries.device)
            first, end = shape.sight.interval(positions, source_lens[sequence])
            first_block, last = int(first[0]) // shape.block_tokens, int(end[-1])
            blocks = batch.block_tables[sequence, first_block : -(-last // shape.block_tokens)].long()
            base = first_block * shape.block_tokens  # the position of the first key
            stored = cache[blocks].flatten(0, 1)[: last - base].float()  # [context, kv_heads, stored_dim]
            for row in range(start, stop, MAX_QUERY_ROWS):
                rows = slice(row, min(row + MAX_QUERY_ROWS, stop))
                within = slice(rows.start - start, rows.stop - start)
                seen = _Seen(base, positions[within], first[within], end[within])
                out[rows] = self._attend_one(queries[rows].float(), stored, seen, sinks, bias).to(out.dtype)
        return out

    def _attend_one(
        self, queries: Tensor, stored: Tensor, seen: _Seen, sinks: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """queries [rows, heads, head_dim] of one sequence, stored [context, kv_heads, stored_dim] → [rows, heads,
        value_dim]"""
        shape = self.shape
        rows, heads, dim = queries.shape
        low, high = int(seen.first[0]), int(seen.stop[-1])
        stored = stored[low - seen.base : high - seen.base]
        keys = stored[..., : shape.head_dim]
        values = stored[..., : shape.result_dim] if shape.values_in_keys else stored[..., dim:]
        groups = queries.view(rows, shape.num_kv_heads, -1, dim)  # query heads by the KV head they read
        scores = torch.einsum("qghd,kgd->ghqk", groups, keys) * shape.scale
        if shape.soft_cap is not None:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        places = torch.arange(low, high, device=queries.device)
        if shape.alibi is not None:
            scores += self._alibi(shape.alibi, places).view(*scores.shape[:2], 1, -1)
        if bias is not None:
            farthest = bias.shape[1] // 2
            distances = (places - seen.positions[:, None]).clamp_(-farthest, farthest)
            scores += bias[:, distances + farthest].view(scores.shape)
        hidden = (places < seen.first[:, None]) | (places >= seen.stop[:, None])
        scores = scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, rows, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : high - low]
        return torch.einsum("ghqk,kgd->qghd", weights, values).reshape(rows, heads, -1)

    def _alibi(self, alibi: Alibi, positions: Tensor) -> Tensor:
        """[heads, keys] float32. The softmax does not see that positions are counted from the sequence's start."""
        slopes = torch.tensor(alibi.slopes, device=positions.device)[:, None]
        bias = (slopes.bfloat16() * positions.bfloat16()).float() if alibi.is_bfloat16 else slopes * positions
        return bias * self.shape.scale if alibi.is_scaled else bias


@dataclass(frozen=True, slots=True)
class _Seen:
    """What some queries of one sequence see, in its positions."""

    base: int  # of the first key that was read
    positions: Tensor  # [rows] of the queries
    first: Tensor  # [rows]
    stop: Tensor  # [rows]
