"""Token embedding and output head, sharded by the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.activation import SoftCap
from penstock_server.device.attention.interface import StepAdapters
from penstock_server.device.native.ops import NativeLinear
from penstock_server.device.ops import Elementwise, Lookup, Ops, PackedLinear
from penstock_server.layers.step import AddAdapters
from penstock_server.parallel import RankGroup

_PIECE_TOKENS = 1024  # rows of the output matrix that ranks exchange at a time
_PIECE_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class VocabularyEmbedding:
    lookup: Lookup  # over this rank's rows of the table
    part: range  # the token ids of these rows
    group: RankGroup

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden], the same on all ranks."""
        if self.group.size == 1:
            return self.lookup(token_ids)
        rows = token_ids - self.part.start
        is_elsewhere = (rows < 0) | (rows >= len(self.part))
        embedded = self.lookup(rows.masked_fill_(is_elsewhere, 0))
        embedded.masked_fill_(is_elsewhere[:, None], 0.0)
        return self.group.all_reduce(embedded)


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    linear: PackedLinear
    widths: tuple[int, ...]  # tokens of the vocabulary on each rank
    group: RankGroup
    multiplier: float = 1.0
    soft_cap: Elementwise | None = None
    logits_bias: Tensor | None = None  # [vocabulary on this rank]
    add_adapters: AddAdapters | None = None  # what adapters add to the product

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """[rows, hidden] → logits [rows, vocabulary], the same on all ranks. adapters: of the rows; None: no row has
        one."""
        mine = self.linear(x)
        if self.add_adapters is not None and adapters is not None:
            self.add_adapters(x, mine, adapters)
        if self.logits_bias is not None:
            mine += self.logits_bias
        logits = self.group.all_gather_columns(mine, self.widths)
        if self.multiplier != 1.0:
            logits *= self.multiplier
        if self.soft_cap is not None:
            logits = self.soft_cap(logits)
        return logits

    def rows(self, token_ids: Tensor, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows [tokens, hidden] of the matrix on the device, scaled as its logits are, the same on all ranks.
        Those of a quantized layer may be rounded as its products are."""
        rows = self._native_rows if isinstance(self.linear, NativeLinear) else self._multiplied_rows
        found = rows(token_ids.to(device), hidden_size, dtype)
        return found if self.multiplier == 1.0 else found * self.multiplier

    def _multiplied_rows(self, token_ids: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Embedding rows for layouts without row access: multiplies by one-hot rows."""
        rows = torch.empty((len(token_ids), hidden_size), dtype=dtype, device=token_ids.device)
        identity = torch.eye(hidden_size, dtype=dtype, device=token_ids.device)
        bias = self.linear(torch.zeros_like(identity[:1]))
        for units, columns in zip(identity.split(_PIECE_COLUMNS), rows.split(_PIECE_COLUMNS, 1), strict=True):
            mine = self.linear(units) - bias
            columns.copy_(self.group.all_gather_columns(mine, self.widths)[:, token_ids].T)
        return rows

    def _native_rows(self, token_ids: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        assert isinstance(self.linear, NativeLinear)
        first = sum(self.widths[: self.group.rank])
        rows = torch.zeros((len(token_ids), hidden_size), dtype=dtype)
        for ids, piece in zip(token_ids.split(_PIECE_TOKENS), rows.split(_PIECE_TOKENS), strict=True):
            is_mine = (ids >= first) & (ids < first + self.linear.out_features)
            mine = piece.new_empty((int(is_mine.sum()), hidden_size))
            self.linear.packed.copy_rows(ids[is_mine] - first, mine)
            piece[is_mine] = mine
            self.group.all_reduce(piece)
        return rows


def soft_cap(ops: Ops, cap: float) -> Elementwise:
    """logits → cap * tanh(logits / cap) (Gemma 2)"""
    return ops.elementwise(SoftCap(cap))
