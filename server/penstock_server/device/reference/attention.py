"""Paged attention in plain torch, on any device and in any dtype: what the other implementations are tested against.

Sequences are computed one after the other, scores and softmax in float32. Simple rather than fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock_server.device.attention import fp8
from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.attention.interface import (
    Alibi,
    Attention,
    AttentionMask,
    AttentionShape,
    StepBatch,
    Transform,
)

PREFERRED_BLOCK_TOKENS = 16
BATCH_DEPENDENCE = "its matrix products depend on how prompts are cut into chunks"
# Queries whose scores are computed at once: it bounds the score matrix of a long prompt.
MAX_QUERY_ROWS = 256


def unavailable_reason(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """It runs everywhere."""


def unsupported_reason(shape: AttentionShape) -> None:
    """It implements every shape."""


def make(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None, cpu_isa: str
) -> Attention:
    return ReferenceAttention(shape, device, dtype, kv_dtype)


@dataclass(frozen=True, slots=True)
class Visible:
    """What the new tokens of one sequence attend to under one mask."""

    rows: slice  # the sequence's rows of the batch
    positions: Tensor  # [rows] of the queries
    first: Tensor  # [rows] first position that each query attends to
    stop: Tensor  # [rows] end of its interval, exclusive
    blocks: Tensor  # [blocks] the cache blocks that hold all these intervals
    base: int  # position of the first slot of the first block


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """A step's sequences, and what they attend to under each mask, computed for the first layer that has the mask."""

    batch: StepBatch
    query_starts: list[int]
    context_lens: list[int]
    source_lens: list[int]
    by_mask: dict[AttentionMask, list[Visible]] = field(default_factory=dict)

    def visible(self, mask: AttentionMask, block_tokens: int) -> list[Visible]:
        """One entry per sequence that has new tokens."""
        if mask not in self.by_mask:
            rows = [slice(*each) for each in zip(self.query_starts, self.query_starts[1:], strict=False)]
            self.by_mask[mask] = [
                self._visible(mask, block_tokens, sequence, each)
                for sequence, each in enumerate(rows)
                if each.start < each.stop
            ]
        return self.by_mask[mask]

    def _visible(self, mask: AttentionMask, block_tokens: int, sequence: int, rows: slice) -> Visible:
        context_len, tables = self.context_lens[sequence], self.batch.block_tables
        positions = torch.arange(context_len - (rows.stop - rows.start), context_len, device=tables.device)
        first, stop = mask.interval(positions, self.source_lens[sequence])
        if mask.sees_spans and self.batch.ends is not None:
            stop = self.batch.ends[rows].long()
        first_block = int(first[0]) // block_tokens
        blocks = tables[sequence, first_block : -(-int(stop[-1]) // block_tokens)].long()
        return Visible(rows, positions, first, stop, blocks, first_block * block_tokens)


class ReferenceAttention:
    """Implements `Attention`. Cache of one layer: [blocks, block_tokens, kv_heads, head_dim + value_dim], keys
    first; fp8 as int8."""

    name = "reference"
    transforms = False
    latent = None
    preferred_block_tokens = PREFERRED_BLOCK_TOKENS

    def __init__(
        self, shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        """kv_dtype: as of `choose_attention`."""
        self.shape = shape
        self.device = device
        self.kv_dtype = kv_dtype
        self.stored_dtype = dtype if kv_dtype is None else torch.int8
        self.stored_dim = shape.head_dim + (0 if shape.values_in_keys else shape.output_dim)

    def allocate(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, self.shape.block_tokens, self.shape.num_kv_heads, self.stored_dim)
        # Not `torch.zeros`: its pages would be allocated at the first write of a step, where memory may be short.
        return torch.empty(shape, dtype=self.stored_dtype, device=self.device).fill_(0)

    def bytes_per_block(self) -> int:
        return self.shape.block_tokens * self.shape.num_kv_heads * self.stored_dim * self.stored_dtype.itemsize

    @staticmethod
    def prepare(batch: StepBatch) -> ReferenceMetadata:
        context_lens = batch.context_lens.tolist()
        source_lens = [0] * len(context_lens) if batch.source_lens is None else batch.source_lens.tolist()
        return ReferenceMetadata(batch, batch.query_starts.tolist(), context_lens, source_lens)

    def write_kv(
        self,
        cache: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        transform: Transform | None = None,
        scales: KvScales | None = None,
    ) -> None:
        assert transform is None
        if self.kv_dtype is not None:
            scales = scales or KvScales()
            keys = fp8.encode(keys, self.kv_dtype, scales.keys)
            values = fp8.encode(values, self.kv_dtype, scales.values)
        stored = keys if self.shape.values_in_keys else torch.cat([keys, values], dim=-1)
        cache.flatten(0, 1).index_copy_(0, slots, stored)

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        metadata: ReferenceMetadata,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        out = queries.new_empty((queries.shape[0], self.shape.num_heads, self.shape.output_dim))
        for visible in metadata.visible(self.shape.mask, self.shape.block_tokens):
            stored = self._read(cache, visible.blocks, scales)
            for row in range(visible.rows.start, visible.rows.stop, MAX_QUERY_ROWS):
                rows = slice(row, min(row + MAX_QUERY_ROWS, visible.rows.stop))
                attended = self._attend_rows(queries[rows].float(), stored, visible, rows, sinks, bias)
                out[rows] = attended.to(out.dtype)
        return out

    def _read(self, cache: Tensor, blocks: Tensor, scales: KvScales | None) -> Tensor:
        """[slots of these blocks, kv_heads, stored_dim] float32"""
        stored = cache[blocks].flatten(0, 1)
        if self.kv_dtype is None:
            return stored.float()
        scales = scales or KvScales()
        keys, values = stored.tensor_split([self.shape.head_dim], dim=-1)
        decoded = [fp8.decode(keys, self.kv_dtype, scales.keys), fp8.decode(values, self.kv_dtype, scales.values)]
        return torch.cat(decoded, dim=-1)

    def _attend_rows(
        self, queries: Tensor, stored: Tensor, visible: Visible, rows: slice, sinks: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """queries [rows, heads, head_dim] of one sequence, stored [slots, kv_heads, stored_dim] → [rows, heads,
        value_dim]"""
        shape = self.shape
        within = slice(rows.start - visible.rows.start, rows.stop - visible.rows.start)
        positions, first, stop = visible.positions[within], visible.first[within], visible.stop[within]
        low, high = int(first[0]), int(stop[-1])  # positions that any of these rows attends to
        stored = stored[low - visible.base : high - visible.base]
        num_rows, heads, dim = queries.shape
        keys = stored[..., : shape.head_dim]
        values = stored[..., : shape.output_dim] if shape.values_in_keys else stored[..., dim:]
        groups = queries.view(num_rows, shape.num_kv_heads, -1, dim)  # query heads by the KV head that they read
        scores = torch.einsum("qghd,kgd->ghqk", groups, keys) * shape.scale
        if shape.soft_cap is not None:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        key_positions = torch.arange(low, high, device=queries.device)
        if shape.alibi is not None:
            scores += self._alibi(shape.alibi, key_positions).view(*scores.shape[:2], 1, -1)
        if bias is not None:
            farthest = bias.shape[1] // 2
            distances = (key_positions - positions[:, None]).clamp_(-farthest, farthest)
            scores += bias[:, distances + farthest].view(scores.shape)
        is_masked = (key_positions < first[:, None]) | (key_positions >= stop[:, None])
        scores = scores.masked_fill_(is_masked, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, num_rows, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : high - low]
        return torch.einsum("ghqk,kgd->qghd", weights, values).reshape(num_rows, heads, -1)

    def _alibi(self, alibi: Alibi, positions: Tensor) -> Tensor:
        """[heads, keys] float32. Positions count from the start of the sequence; softmax ignores that offset."""
        slopes = torch.tensor(alibi.slopes, device=positions.device)[:, None]
        bias = (slopes.bfloat16() * positions.bfloat16()).float() if alibi.is_bfloat16 else slopes * positions
        return bias * self.shape.scale if alibi.is_scaled else bias
