"""Applies masks to scores: tokens that they do not allow get no probability."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# On the device: rows that have a mask [rows] int64, and the masks [rows, words] int32: bit b of word w allows token
# 32·w + b. A mask that allows no token breaks its row.
Masks = tuple[Tensor, Tensor]

_NOTHING = float("-inf")


class Constrainer:
    """Applies masks on one device."""

    def __init__(self, device: torch.device) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._of_byte = torch.from_numpy(np.where(bits, 0.0, _NOTHING)).to(
            device
        )  # by byte of a mask: what is added to eight tokens' scores
        self._tables: dict[torch.dtype, Tensor] = {}

    def apply(self, scores: Tensor, places: Tensor, words: Tensor) -> None:
        """Set the scores [rows, vocab] of tokens to -inf, in place, that the masks [places, words] of rows `places` do
        not allow.

        When nothing is left, because min_new_tokens forbids the stop tokens and the mask allows only those, they are
        allowed nevertheless, with equal scores.
        """
        added = self._expand(words, scores.dtype)[:, : scores.shape[1]]
        everywhere = len(places) == len(scores)
        mine = scores.add_(added) if everywhere else scores[places].add_(added)
        is_empty = mine.amax(-1) == _NOTHING
        if mine.device.type == "cpu":
            empty = is_empty.nonzero().squeeze(1)
            mine[empty] = added[empty]
        else:  # without waiting for the device
            mine.copy_(torch.where(is_empty[:, None], added, mine))
        if not everywhere:
            scores[places] = mine

    def applied(self, logits: Tensor, places: Tensor, words: Tensor) -> Tensor:
        """The same on a copy, for logits in which no token was forbidden before."""
        added = self._expand(words, logits.dtype)[:, : logits.shape[1]]
        return logits + added if len(places) == len(logits) else logits.index_add(0, places, added)

    def _expand(self, words: Tensor, dtype: torch.dtype) -> Tensor:
        """[places, words] → [places, 32·words] of 0 and -inf."""
        octets, table = words.view(torch.uint8), self._tables.get(dtype)
        if table is None:
            table = self._tables[dtype] = self._of_byte.to(dtype)
        if table.device.type != "cpu":
            return table[octets.long()].flatten(1)
        # PERF: 16 rows of 49,152 in 0.1 ms, 0.17 ms with the addition; masked_fill_ takes 2.7 ms (EPYC, one thread).
        # Eight tokens at a time are one number to numpy, which does not know bfloat16.
        rows = table.view(torch.uint8).numpy()
        return torch.from_numpy(rows.take(octets.numpy(), axis=0, mode="clip").reshape(len(octets), -1)).view(dtype)
