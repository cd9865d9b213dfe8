"""Paged attention in native kernels: bf16 on CPUs with AVX-512 BF16. A row's result depends neither on the other rows
nor on how its prompt was cut into chunks.

Cache of one layer: [blocks, kv_heads * (keys, values) of a block]; the kernels own the order inside. They need head
dimensions that are multiples of 16: others are padded with zeros, which change neither scores nor values.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from penstock_server.kernels import native_ops

if TYPE_CHECKING:
    from torch import Tensor

    from penstock_server.attention.interface import AttentionShape, StepBatch

HEAD_DIM_MULTIPLE = 16


def supports(shape: AttentionShape) -> bool:
    """Whether the kernels run on this CPU and implement this shape."""
    if not native_ops.available():
        return False
    import penstock_kernels

    # Values that are part of their keys are read in whole vectors.
    is_whole = not shape.values_in_keys or shape.output_dim % HEAD_DIM_MULTIPLE == 0
    fits = shape.block_tokens == penstock_kernels.BLOCK_TOKENS and shape.head_dim <= penstock_kernels.MAX_DIM
    return fits and is_whole and shape.output_dim <= penstock_kernels.MAX_DIM


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """A step's batch as the kernels read it."""

    batch: StepBatch  # owns the memory behind the addresses
    addresses: tuple[int, int, int, int, int, int | None]
    max_context_tokens: int


class NativeAttention:
    """Implements `Attention`."""

    name = "native"
    preferred_block_tokens = 16  # penstock_kernels.BLOCK_TOKENS, the only size that the kernels know

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        # Zeros behind the last element of each key head and each value head.
        self._padding = (-shape.head_dim % HEAD_DIM_MULTIPLE, -shape.output_dim % HEAD_DIM_MULTIPLE)
        padded = SimpleNamespace(  # the attributes that the kernels read
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim + self._padding[0],
            result_dim=shape.output_dim + self._padding[1],
            values_in_keys=shape.values_in_keys,
            scale=shape.scale,
            sight=shape.mask,
            soft_cap=shape.soft_cap,
            alibi=shape.alibi,
            has_bias=shape.has_relative_bias,
        )
        self.native = native_ops.make_kernels().attention(padded)

    @property
    def is_padded(self) -> bool:
        """Whether the cache's heads are wider than the shape's."""
        return any(self._padding)

    def allocate(self, num_blocks: int) -> Tensor:
        import penstock_kernels
        import torch

        shape = (num_blocks, self.native.block_numbers())
        # Anonymous memory is zeroed by the system, and a page costs nothing until it is touched.
        memory = mmap.mmap(-1, math.prod(shape) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        cache = torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)
        penstock_kernels.advise_huge_pages(cache.data_ptr(), cache.nbytes)
        return cache

    def bytes_per_block(self) -> int:
        return self.native.block_numbers() * 2

    @staticmethod
    def prepare(batch: StepBatch) -> NativeMetadata:
        tables, source_lens = batch.block_tables, batch.source_lens
        num_sequences, max_blocks = tables.shape
        assert tables.is_contiguous()
        addresses = (
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            max_blocks,
            num_sequences,
            None if source_lens is None else source_lens.data_ptr(),
        )
        return NativeMetadata(batch, addresses, batch.max_context_tokens)

    def write_kv(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys = _padded(keys, self._padding[0])
        values = keys if self.shape.values_in_keys else _padded(values, self._padding[1])
        self.native.write(
            cache.data_ptr(),
            (keys.data_ptr(), native_ops.token_stride(keys)),
            (values.data_ptr(), native_ops.token_stride(values)),
            slots.data_ptr(),
            keys.shape[0],
        )

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        metadata: NativeMetadata,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        assert (bias is not None) == self.shape.has_relative_bias
        queries = _padded(queries, self._padding[0])
        sinks = None if sinks is None else sinks.to(queries.dtype).contiguous()
        bias = None if bias is None else bias.float().contiguous()
        output = queries.new_empty((*queries.shape[:2], self.shape.output_dim + self._padding[1]))
        span = min(metadata.max_context_tokens, self.shape.mask.max_span or metadata.max_context_tokens)
        self.native.attend(
            (queries.data_ptr(), native_ops.token_stride(queries)),
            cache.data_ptr(),
            metadata.addresses,
            None if sinks is None else sinks.data_ptr(),
            None if bias is None else (bias.data_ptr(), bias.shape[1] // 2),
            output.data_ptr(),
            queries.shape[0] * span,
        )
        return output[..., : self.shape.output_dim]


def _padded(x: Tensor, padding: int) -> Tensor:
    """[..., dim] → [..., dim + padding]"""
    if padding == 0:
        return x
    import torch

    return torch.nn.functional.pad(x, (0, padding))
