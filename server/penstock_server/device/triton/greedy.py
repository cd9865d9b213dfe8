"""The greedy choice of each row in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock_server.device.triton import device as triton_device

_BLOCK = 4096


@triton.jit
def greedy_kernel(
    logits,  # [rows, vocab]
    ids,  # [rows] int64
    logprobs,  # [rows] float32
    mask_rows,  # [rows] int64: the row's mask in `words`; -1: all tokens are allowed. None: of every row
    words,  # [masks, num_words] int32
    row_stride,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    """Grid: rows. Each lane keeps the greatest of its own tokens, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    minus_infinity = float("-inf")
    best = tl.full([BLOCK], minus_infinity, tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = token < vocab
        x = tl.load(logits + row * row_stride + token, mask=is_token, other=minus_infinity).to(tl.float32)
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        if mask_rows is not None:
            mask_row = tl.load(mask_rows + row)
            if mask_row >= 0:
                word = tl.load(words + mask_row * num_words + token // 32, mask=is_token, other=0)
                x = tl.where(((word >> (token % 32)) & 1) == 1, x, minus_infinity)
        top = tl.maximum(best, x)
        anchor = tl.where(top == minus_infinity, 0.0, top)
        total = total * tl.exp(best - anchor) + tl.exp(x - anchor)
        best_id = tl.where(x > best, token, best_id)
        best = top
    top = tl.max(best, 0)
    anchor = tl.where(top == minus_infinity, 0.0, top)
    sum_of_lanes = tl.sum(total * tl.exp(best - anchor), 0)
    is_broken = (tl.max(broken, 0) != 0) | (top == minus_infinity)
    chosen = tl.min(tl.where(best == top, best_id, 2147483647), 0)
    tl.store(ids + row, tl.where(is_broken, -1, chosen).to(tl.int64))
    tl.store(logprobs + row, tl.where(is_broken, float("nan"), -tl.log(sum_of_lanes)))


def choose(logits: Tensor, masks: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """See `greedy.Greedy`."""
    num_rows, vocab = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    mask_rows = words = None
    if masks is not None:
        mask_rows = torch.full_like(ids, -1)
        rows, words = masks
        mask_rows[rows] = torch.arange(len(rows), device=logits.device)
    triton_device.launch(
        greedy_kernel,
        (num_rows, 1),
        logits=logits,
        ids=ids,
        logprobs=logprobs,
        mask_rows=mask_rows,
        words=words,
        row_stride=logits.stride(0),
        vocab=vocab,
        num_words=0 if words is None else words.shape[1],
        BLOCK=_BLOCK,
        num_warps=16,
    )
    return ids, logprobs
