"""Paged attention as native kernels: bf16 on CPUs with AVX-512 BF16. Results of a row never depend on the other rows,
nor on how its prompt was chunked.

Cache of one layer: [blocks, kv_heads, 2 (keys, values), block_tokens * head_dim]; the kernels own the order inside.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

from penstock_server.kernels import native_ops

if TYPE_CHECKING:
    from torch import Tensor

    from penstock_server.attention.interface import AttentionShape, StepBatch

BLOCK_TOKENS = 16
MAX_HEAD_DIM = 256


def available(shape: AttentionShape) -> bool:
    """Whether the kernels run here and are made for such heads."""
    fits = shape.head_dim % 16 == 0 and shape.head_dim <= MAX_HEAD_DIM and shape.block_tokens == BLOCK_TOKENS
    is_context = shape.sight.part == "context" and not shape.has_bias  # nothing of encoders
    has_plain_values = shape.result_dim == shape.head_dim and not shape.values_in_keys
    return fits and is_context and has_plain_values and native_ops.available()


class NativeAttention:
    """Implements `Attention`, and a fused rotation and write."""

    name = "native"

    def __init__(self, shape: AttentionShape, num_threads: int | None = None) -> None:
        self.shape = shape
        kernels = native_ops.make_kernels(num_threads)
        self.native = kernels.attention(shape)

    def allocate(self, num_blocks: int, num_layers: int) -> list[Tensor]:
        import penstock_kernels
        import torch

        shape = (num_layers, num_blocks, self.shape.num_kv_heads, 2, BLOCK_TOKENS * self.shape.head_dim)
        # The system's own zeros: a page costs nothing until it is touched.
        room = mmap.mmap(-1, math.prod(shape) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        caches = torch.frombuffer(room, dtype=torch.bfloat16).view(shape)
        penstock_kernels.advise_huge_pages(caches.data_ptr(), caches.nbytes)
        return list(caches.unbind())

    def bytes_per_block(self) -> int:
        return self.native.block_numbers() * 2

    def write(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.native.write(
            cache.data_ptr(),
            (keys.data_ptr(), native_ops.token_stride(keys)),
            (values.data_ptr(), native_ops.token_stride(values)),
            slots.data_ptr(),
            keys.shape[0],
        )

    def rotate_and_write(
        self,
        cache: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        """`Ops.rotate` of queries and keys, then `write` of keys and values, in one. heads: queries, keys, values
        [tokens, heads, head_dim]; rope: cos, sin."""
        queries, keys, values = heads
        cos, sin = rope
        self.native.rotate_and_write(
            cache.data_ptr(),
            (queries.data_ptr(), native_ops.token_stride(queries)),
            (keys.data_ptr(), native_ops.token_stride(keys)),
            (values.data_ptr(), native_ops.token_stride(values)),
            (cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), cos.shape[1]),
            slots.data_ptr(),
            queries.shape[0],
        )

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        batch: StepBatch,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        assert bias is None, "the kernels know no biases"
        sinks = None if sinks is None else sinks.to(queries.dtype).contiguous()
        output = queries.new_empty(queries.shape)
        seen = min(batch.max_context_tokens, self.shape.sight.width or batch.max_context_tokens)
        self.native.attend(
            (queries.data_ptr(), native_ops.token_stride(queries)),
            cache.data_ptr(),
            batch_addresses(batch),
            None if sinks is None else sinks.data_ptr(),
            output.data_ptr(),
            queries.shape[0] * seen,
        )
        return output


def batch_addresses(batch: StepBatch) -> tuple[int, int, int, int, int]:
    """What the kernels need to know of a batch."""
    starts, context_lens, tables = batch.query_starts, batch.context_lens, batch.block_tables
    num_sequences, max_blocks = tables.shape
    assert tables.is_contiguous()
    return starts.data_ptr(), context_lens.data_ptr(), tables.data_ptr(), max_blocks, num_sequences
