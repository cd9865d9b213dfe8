"""Paged attention in native kernels on a CPU. A row's result depends neither on the other rows
nor on how its prompt was cut into chunks.

Cache of one layer: [blocks, kv_heads * (keys, values) of a block], fp8 as int8; the kernels own the order inside. They
need head dimensions that are multiples of 16: others are padded with zeros, which change neither scores nor values.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock_server.device.native.build import NATIVE_PACKAGE, NativeBuild, find_build

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock_server.device.attention.fp8 import KvScales
    from penstock_server.device.attention.interface import Attention, AttentionShape, StepBatch, Transform

PREFERRED_BLOCK_TOKENS = 16  # BLOCK_TOKENS of every build, the only size that the kernels know
MAX_DIM = 1024  # the largest head dimension of every build
BATCH_DEPENDENCE = ""
HEAD_DIM_MULTIPLE = 16


def unavailable_reason(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> str | None:
    """Why the kernels cannot run on this device in these data types, for people. None: they can."""
    if find_build(device, dtype) is not None:
        return None
    found = f"{device.type} in {str(dtype).removeprefix('torch.')}"
    return f"it needs {NATIVE_PACKAGE} for this CPU and data type; this is {found}"


def unsupported_reason(shape: AttentionShape) -> str | None:
    """Why the kernels do not implement this shape, for people. None: they do."""
    if shape.block_tokens != PREFERRED_BLOCK_TOKENS:
        return f"KV blocks have {shape.block_tokens} tokens, must be {PREFERRED_BLOCK_TOKENS}"
    if (dim := max(shape.head_dim, shape.output_dim)) > MAX_DIM:
        return f"heads have {dim} elements, at most {MAX_DIM} are supported"
    if shape.values_in_keys and shape.output_dim % HEAD_DIM_MULTIPLE:  # they are read in whole vectors
        return f"values in keys have {shape.output_dim} elements, must be a multiple of {HEAD_DIM_MULTIPLE}"
    return None


def make(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None, cpu_isa: str
) -> Attention:
    build = find_build(device, dtype, cpu_isa)
    assert build is not None, "checked by unavailable_reason"
    return NativeAttention(shape, build, kv_dtype)


def native_batch(build: NativeBuild, batch: StepBatch) -> Any:
    """The sequences of a step as native kernels know them."""
    lens = batch.query_starts, batch.context_lens
    return build.module.Batch(*lens, batch.block_tables, batch.source_lens, batch.ends)


class NativeAttention:
    """Implements `Attention`."""

    name = "native"
    transforms = False
    latent = None
    preferred_block_tokens = PREFERRED_BLOCK_TOKENS

    def __init__(self, shape: AttentionShape, build: NativeBuild, kv_dtype: torch.dtype | None = None) -> None:
        """kv_dtype: as of `choose_attention`."""
        import torch

        self.shape = shape
        self._build = build
        self._stored_dtype = build.dtype if kv_dtype is None else torch.int8
        # Zeros behind the last element of each key head and each value head.
        self._padding = (-shape.head_dim % HEAD_DIM_MULTIPLE, -shape.output_dim % HEAD_DIM_MULTIPLE)
        head_padding, value_padding = self._padding
        padded = replace(shape, head_dim=shape.head_dim + head_padding, value_dim=shape.output_dim + value_padding)
        stored = None if kv_dtype is None else str(kv_dtype).removeprefix("torch.")
        self.native = build.kernels().attention(padded, stored)

    @property
    def padded_dims(self) -> tuple[int, int]:
        """Elements of a key head and of a value head in the cache."""
        return self.shape.head_dim + self._padding[0], self.shape.output_dim + self._padding[1]

    def allocate(self, num_blocks: int) -> Tensor:
        import torch

        shape = (num_blocks, self.native.block_numbers)
        # Anonymous memory is zeroed by the system, and a page costs nothing until it is touched.
        num_bytes = num_blocks * self.bytes_per_block()
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        cache = torch.frombuffer(memory, dtype=self._stored_dtype).view(shape)
        self._build.module.advise_huge_pages(cache)
        return cache

    def bytes_per_block(self) -> int:
        return self.native.block_numbers * self._stored_dtype.itemsize

    def prepare(self, batch: StepBatch) -> Any:
        return native_batch(self._build, batch)

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
        stored = None if self.shape.values_in_keys else _padded(values, self._padding[1])
        self.native.write(cache, _padded(keys, self._padding[0]), stored, slots, scales)

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        metadata: Any,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        queries = _padded(queries, self._padding[0])
        sinks = None if sinks is None else sinks.to(queries.dtype).contiguous()
        bias = None if bias is None else bias.float().contiguous()
        output = queries.new_empty(queries.shape[0], self.shape.num_heads, self.shape.output_dim + self._padding[1])
        self.native.attend(queries, cache, metadata, output, sinks, bias, scales)
        return output[..., : self.shape.output_dim] if self._padding[1] else output


def _padded(x: Tensor, padding: int) -> Tensor:
    """[..., dim] → [..., dim + padding]"""
    if padding == 0:
        return x
    import torch

    return torch.nn.functional.pad(x, (0, padding))
