"""The greatest logit of each row and its logprob: the whole of sampling for sequences that ask for nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock_server.kernels import may_be_native

BLOCK = 64  # rows are padded to a multiple of it

# Logits [rows, vocab] → ids [rows] int64 and logprobs [rows] float32, not finite where the row is not.
Greedy = Callable[[Tensor], tuple[Tensor, Tensor]]


def native_greedy(device: torch.device) -> Greedy | None:
    """The native kernel for bf16 logits, where there is one.

    PERF: 32 × 49,152 on one thread of an EPYC: 0.55 ms; by torch's operators 1.2 ms.
    """
    if not may_be_native(device, torch.bfloat16):
        return None
    from penstock_server.kernels import native_ops

    return native_ops.NativeOps().argmax_logprob if native_ops.available() else None


def greatest(scores: Tensor) -> Tensor:
    """[rows, a multiple of BLOCK] float32 → [rows]: where each row is greatest, the lowest id of several.

    PERF: torch's argmax is not vectorized; a maximum by blocks and a search in one block is 8 times as fast
    (0.16 against 1.3 ms for 32 × 49,152 float32, EPYC, one thread).
    """
    blocks = scores.view(scores.shape[0], -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(best), device=best.device), best].argmax(-1)
    return best * BLOCK + inside
