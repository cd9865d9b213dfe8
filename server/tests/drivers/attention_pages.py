"""Sequences in paged caches, to compare an attention implementation with the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from penstock_server.device.attention import fp8
from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.attention.interface import AttentionShape, StepBatch
from penstock_server.device.reference.attention import ReferenceAttention
from tested_device import DEVICE
from torch import Tensor

if TYPE_CHECKING:
    from penstock_server.device.triton.attention.backend import TritonAttention

NAN_BITS = 0x7F  # in both fp8 dtypes
Step = list[tuple[int, int, int]]  # (sequence, computed tokens, new tokens)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def stored_rows(shape: AttentionShape, keys: Tensor, values: Tensor) -> Tensor:
    """[tokens, kv_heads, elements of a cache row]"""
    return keys if shape.values_in_keys else torch.cat([keys, values], dim=2)


class Pages:
    """Sequences whose keys and values lie in shuffled blocks of a cache of Triton's layout and of a reference cache.
    Slots of no sequence are NaN in the former, so that reading them is seen.

    dtype: of queries and of the reference cache. kv_dtype: an fp8 dtype of the attention's cache; the reference cache
    holds the same rounded keys and values."""

    def __init__(
        self,
        attention: TritonAttention,
        dtype: torch.dtype,
        lengths: list[int],
        source_lens: list[int] | None = None,
        has_sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
        scales: KvScales | None = None,
        images: tuple[range, ...] = (),
    ) -> None:
        """images: positions in every sequence that attend to each other, if a step's context has all of them."""
        self.images = images
        self.attention = attention
        self.shape = shape = attention.shape
        self.source_lens = source_lens
        self.dtype = dtype
        self.scales = scales
        self.reference = ReferenceAttention(shape, DEVICE, dtype)
        self.sinks = random(1, shape.num_heads).to(dtype) if has_sinks else None
        self.bias = random(2, shape.num_heads, 2 * 20 + 1) if shape.has_relative_bias else None
        counts = [-(-length // shape.block_tokens) for length in lengths]
        shuffled = torch.randperm(sum(counts), generator=torch.Generator("cpu").manual_seed(3), device="cpu").tolist()
        self.tables = [[shuffled.pop() for _ in range(count)] for count in counts]
        self.unused = sum(counts)  # a block of no sequence
        self.caches = [attention.allocate(self.unused + 1) for attention in (attention, self.reference)]
        self.caches[0].fill_(float("nan") if kv_dtype is None else NAN_BITS)
        self.queries = [
            random(i, length, shape.num_heads, shape.head_dim).to(dtype) for i, length in enumerate(lengths)
        ]
        for sequence, length in enumerate(lengths):
            keys = random(sequence + 100, length, shape.num_kv_heads, shape.head_dim).to(dtype)
            values = random(sequence + 200, length, shape.num_kv_heads, shape.output_dim).to(dtype)
            position = torch.arange(length)
            blocks = torch.tensor(self.tables[sequence])[position // shape.block_tokens]
            slots = blocks * shape.block_tokens + position % shape.block_tokens
            rows = stored_rows(shape, keys, values)
            if kv_dtype is not None:
                heads, of_heads = (keys, values), scales or KvScales()
                bits = [fp8.encode(x, kv_dtype, scale) for x, scale in zip(heads, of_heads, strict=True)]
                rows = stored_rows(shape, *bits)
                both = zip(bits, of_heads, strict=True)
                keys, values = (fp8.decode(each, kv_dtype, scale).to(dtype) for each, scale in both)
            # Not by `write_kv`, because the interpreter takes long for many tokens.
            self.caches[0][blocks, :, position % shape.block_tokens] = rows
            self.reference.write_kv(self.caches[1], keys, values, slots)

    def batch(self, step: Step) -> tuple[Tensor, StepBatch]:
        queries = torch.cat([self.queries[s][computed : computed + new] for s, computed, new in step])
        starts = torch.tensor([0, *(new for _, _, new in step)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([computed + new for _, computed, new in step], dtype=torch.int32)
        tables = torch.full((len(step), max(map(len, self.tables))), 0, dtype=torch.int32)
        sources = None if self.source_lens is None else [self.source_lens[s] for s, _, _ in step]
        for row, (sequence, computed, _) in enumerate(step):
            blocks = self.tables[sequence]
            tables[row, : len(blocks)] = torch.tensor(blocks)
            first, _ = self.shape.mask.interval(torch.tensor([computed]), sources[row] if sources else 0)
            tables[row, : int(first) // self.shape.block_tokens] = self.unused  # released before the window
        none = torch.empty(0, dtype=torch.int64)
        max_new, max_context = max(new for _, _, new in step), int(lens.max())
        source_lens = None if sources is None else torch.tensor(sources, dtype=torch.int32)
        batch = StepBatch(none, none, none, starts, lens, tables, none, max_new, max_context, source_lens)
        return queries, replace(batch, ends=self._ends(step)) if self.images else batch

    def _ends(self, step: Step) -> Tensor:
        tokens = [
            (position, computed + new) for _, computed, new in step for position in range(computed, computed + new)
        ]
        ends = [
            next((each.stop for each in self.images if position in each and each.stop <= context), position + 1)
            for position, context in tokens
        ]
        return torch.tensor(ends, dtype=torch.int32)

    def attend(self, step: Step) -> Tensor:
        queries, batch = self.batch(step)
        metadata = self.attention.prepare(batch)
        return self.attention.attend(queries, self.caches[0], metadata, self.sinks, self.bias, self.scales)

    def assert_near_reference(self, step: Step) -> None:
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(self.dtype, 1e-5)
        queries, batch = self.batch(step)
        metadata = self.reference.prepare(batch)
        expected = self.reference.attend(queries, self.caches[1], metadata, self.sinks, self.bias)
        torch.testing.assert_close(self.attend(step), expected, atol=tolerance, rtol=tolerance)
