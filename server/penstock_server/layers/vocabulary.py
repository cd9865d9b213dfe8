"""Token embedding and output head, each rank holding a part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.kernels.ops import Elementwise, Lookup, Ops, PackedLinear
from penstock_server.parallel import RankGroup


@dataclass(frozen=True, slots=True)
class VocabularyEmbedding:
    lookup: Lookup  # rows of this rank's part of the vocabulary [rows, hidden]
    part: range
    group: RankGroup

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] → [tokens, hidden]"""
        if self.group.size == 1:
            return self.lookup(token_ids)
        rows = token_ids - self.part.start
        elsewhere = (rows < 0) | (rows >= len(self.part))
        embedded = self.lookup(rows.masked_fill_(elsewhere, 0))
        embedded.masked_fill_(elsewhere[:, None], 0.0)
        return self.group.all_reduce(embedded)


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    linear: PackedLinear
    widths: tuple[int, ...]  # each rank's part of the vocabulary
    group: RankGroup
    multiplier: float = 1.0
    soft_cap: Elementwise | None = None
    logits_bias: Tensor | None = None  # [this rank's part of the vocabulary]

    def __call__(self, x: Tensor) -> Tensor | None:
        """[rows, hidden] → [rows, vocabulary] on rank 0; None on the others."""
        mine = self.linear(x)
        if self.logits_bias is not None:
            mine += self.logits_bias
        logits = self.group.gather_columns(mine, self.widths)
        if logits is not None and self.multiplier != 1.0:
            logits *= self.multiplier
        if logits is not None and self.soft_cap is not None:
            logits = self.soft_cap(logits)
        return logits


def soft_cap(ops: Ops, cap: float) -> Elementwise:
    """Logits become cap * tanh(logits / cap) (Gemma 2)."""
    return ops.elementwise(lambda logits: torch.tanh(logits / cap) * cap)
