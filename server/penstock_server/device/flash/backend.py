"""Implements `Attention` with FlashAttention-2, over the cache of `TritonAttention`.

Prompts and decode rows are computed by `flash_attn_varlen_func`, which never reads a device tensor on the host. In a
step of decode rows alone it runs the kernels of `flash_attn_with_kvcache`, splits included, if query heads share KV
heads and there is neither a window nor ALiBi. The Triton kernels compute the decode steps of other layers, since they
split every context. `flash_attn_with_kvcache` itself is not used: its newest version reads the lengths on the host, so
every layer would wait for the device, and no graph could record it.

The bits of a decode row depend on its batch: the package chooses the number of splits by the number of sequences and
the longest context. This function has no parameter for another choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.attention.interface import AttentionShape, StepBatch
from penstock_server.device.flash import PREFERRED_BLOCK_TOKENS
from penstock_server.device.triton.attention.backend import TritonAttention, TritonMetadata


@dataclass(frozen=True, slots=True)
class FlashMetadata(TritonMetadata):
    context_starts: Tensor = field(kw_only=True)  # [sequences + 1] int32: cumulative lengths of the contexts


class FlashAttention(TritonAttention):
    """Implements `Attention`. Cache of one layer: as TritonAttention's; FlashAttention-2 reads keys and values with any
    strides of blocks, tokens and heads."""

    name = "flash"
    preferred_block_tokens = PREFERRED_BLOCK_TOKENS

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, device, dtype)
        from flash_attn import flash_attn_varlen_func

        window = shape.mask.window
        self._flash = flash_attn_varlen_func
        self._options = {
            "softmax_scale": shape.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),  # keys before and after the query
            "softcap": shape.soft_cap or 0.0,
            "alibi_slopes": None if self._slopes is None else self._slopes * self._alibi_scale,
        }
        # PERF: of a step of decode rows alone. Without splits, one multiprocessor reads the whole context of a head.
        self._splits_contexts = shape.num_heads > shape.num_kv_heads and window is None and shape.alibi is None

    @staticmethod
    def prepare(batch: StepBatch) -> FlashMetadata:
        ends = batch.context_lens.cumsum(0, dtype=torch.int32)
        return FlashMetadata(batch, context_starts=torch.nn.functional.pad(ends, (1, 0)))

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        metadata: Any,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        assert scales is None, "the cache is never in fp8"
        batch: StepBatch = metadata.batch
        if batch.max_query_tokens == 1 and not self._splits_contexts:
            return super().attend(queries, cache, metadata, sinks, bias)
        assert sinks is None, "the shape says whether there are sinks"
        assert bias is None
        # [blocks, kv_heads, block_tokens, 2 * head_dim] → two views [blocks, block_tokens, kv_heads, head_dim]
        keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
        output: Tensor = self._flash(
            queries,
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=metadata.context_starts,
            max_seqlen_q=batch.max_query_tokens,
            max_seqlen_k=batch.max_context_tokens,
            block_table=batch.block_tables,
            **self._options,
        )
        return output
