"""Stands in for the package flash_attn: its documented semantics, query by query, and what its C++ code checks."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,  # [queries, heads, head_dim]
    k: Tensor,  # [blocks, block_tokens, kv_heads, head_dim]
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    block_table: Tensor,
) -> Tensor:
    """The parameters of the real function that the backend uses."""
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    num_sequences, block_tokens, ratio = block_table.shape[0], k.shape[1], q.shape[1] // k.shape[2]
    if max_seqlen_q == 1:
        assert q.shape[0] == num_sequences, "it then takes one query for each sequence"
    out = torch.zeros_like(q)
    for sequence in range(num_sequences):
        begin, end = cu_seqlens_q[sequence : sequence + 2].tolist()
        num_keys = int(cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence])
        assert end - begin <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        for row in range(begin, end):
            # The last query is at the position of the last key.
            position = row - begin + num_keys - (end - begin)
            low = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            high = num_keys if window_size[1] < 0 else min(num_keys, position + window_size[1] + 1)
            if causal:
                high = min(high, position + 1)
            keys = torch.arange(low, high)
            if not len(keys):
                continue
            blocks = block_table[sequence, keys // block_tokens].long()
            # [keys, heads, head_dim]
            seen_keys = k[blocks, keys % block_tokens].float().repeat_interleave(ratio, dim=1)
            seen_values = v[blocks, keys % block_tokens].float().repeat_interleave(ratio, dim=1)
            scores = (seen_keys * q[row].float()).sum(-1) * softmax_scale  # [keys, heads]
            if softcap > 0:
                scores = softcap * (scores / softcap).tanh()
            if alibi_slopes is not None:
                scores -= alibi_slopes * (position - keys).abs()[:, None]
            out[row] = (scores.softmax(0)[..., None] * seen_values).sum(0).to(q.dtype)
    return out


def check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor) -> None:
    """What the C++ code refuses."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert len({tensor.device for tensor in (q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)}) == 1
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v, block_table))
    assert all(tensor.dtype == torch.int32 for tensor in (cu_seqlens_q, cu_seqlens_k, block_table))
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert k.shape == v.shape
    assert k.shape[1] % 256 == 0
    assert q.shape[2] == k.shape[3]
    assert q.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[2] == 0
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (block_table.shape[0] + 1,)
