"""Paged attention as native kernels: bf16 on CPUs with AVX-512 BF16. Results of a row never depend on the other rows,
nor on how its prompt was chunked.

Cache of one layer: [blocks, kv_heads * (keys, values) of a block]; the kernels own the order inside. Their heads are
multiples of 16 wide: others are filled up with zeros, which change no score and no value.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock_server.kernels import native_ops

if TYPE_CHECKING:
    from torch import Tensor

    from penstock_server.attention.interface import AttentionShape, StepBatch

DIMS = 16  # heads' widths are multiples of it


def available(shape: AttentionShape) -> bool:
    """Whether the kernels run here and are made for such heads."""
    if not native_ops.available():
        return False
    import penstock_kernels

    # Values inside of keys are read in vectors.
    is_whole = not shape.values_in_keys or shape.result_dim % DIMS == 0
    fits = shape.block_tokens == penstock_kernels.BLOCK_TOKENS and shape.head_dim <= penstock_kernels.MAX_DIM
    return fits and is_whole and shape.result_dim <= penstock_kernels.MAX_DIM


class NativeAttention:
    """Implements `Attention`, and a fused rotation and write."""

    name = "native"

    def __init__(self, shape: AttentionShape, num_threads: int | None = None) -> None:
        self.shape = shape
        kernels = native_ops.make_kernels(num_threads)
        self._missing = (-shape.head_dim % DIMS, -shape.result_dim % DIMS)  # numbers of keys and of values
        widths = (shape.head_dim + self._missing[0], shape.result_dim + self._missing[1])
        self.native = kernels.attention(replace(shape, head_dim=widths[0], value_dim=widths[1]))

    @property
    def is_filled_up(self) -> bool:
        """Whether heads are wider than the shape says."""
        return any(self._missing)

    def allocate(self, num_blocks: int, num_layers: int) -> list[Tensor]:
        import penstock_kernels
        import torch

        shape = (num_layers, num_blocks, self.native.block_numbers())
        # The system's own zeros: a page costs nothing until it is touched.
        room = mmap.mmap(-1, math.prod(shape) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        caches = torch.frombuffer(room, dtype=torch.bfloat16).view(shape)
        penstock_kernels.advise_huge_pages(caches.data_ptr(), caches.nbytes)
        return list(caches.unbind())

    def bytes_per_block(self) -> int:
        return self.native.block_numbers() * 2

    def write(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys = _filled_up(keys, self._missing[0])
        values = keys if self.shape.values_in_keys else _filled_up(values, self._missing[1])
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
        [tokens, heads, head_dim]; rope: cos, sin. Not if `is_filled_up`."""
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
        assert (bias is not None) == self.shape.has_bias
        queries = _filled_up(queries, self._missing[0])
        sinks = None if sinks is None else sinks.to(queries.dtype).contiguous()
        bias = None if bias is None else bias.float().contiguous()
        output = queries.new_empty((*queries.shape[:2], self.shape.result_dim + self._missing[1]))
        seen = min(batch.max_context_tokens, self.shape.sight.width or batch.max_context_tokens)
        self.native.attend(
            (queries.data_ptr(), native_ops.token_stride(queries)),
            cache.data_ptr(),
            batch_addresses(batch),
            None if sinks is None else sinks.data_ptr(),
            None if bias is None else (bias.data_ptr(), bias.shape[1] // 2),
            output.data_ptr(),
            queries.shape[0] * seen,
        )
        return output[..., : self.shape.result_dim]


def batch_addresses(batch: StepBatch) -> tuple[int, int, int, int, int, int | None]:
    """What the kernels need to know of a batch."""
    tables, source_lens = batch.block_tables, batch.source_lens
    num_sequences, max_blocks = tables.shape
    assert tables.is_contiguous()
    return (
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        tables.data_ptr(),
        max_blocks,
        num_sequences,
        None if source_lens is None else source_lens.data_ptr(),
    )


def _filled_up(x: Tensor, missing: int) -> Tensor:
    """[..., dim] → [..., dim + missing]"""
    if missing == 0:
        return x
    import torch

    return torch.nn.functional.pad(x, (0, missing))
