"""Drafts from the sequence's own text: what followed its last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock_server.engine.drafting.interface import Tokens
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable

_MIN_MATCH = 2  # tokens of the end of a text that must occur before
_MAX_MATCH = 8  # a longer match does not make a better draft
_MAX_HISTORY = 1 << 15  # last tokens that are searched


def continuation(history: Tokens, most: int, least_match: int = _MIN_MATCH) -> Tokens:
    """[≤ most]: what followed the longest end of `history` where it occurred before, at its last occurrence with `most`
    tokens behind it, or else at the first one. Empty: not even its last `least_match` tokens occurred before."""
    history = history[-_MAX_HISTORY:]
    ends = np.flatnonzero(history[:-1] == history[-1])  # last tokens of the matches
    num_matched = 1
    while len(ends) and num_matched < min(_MAX_MATCH, len(history) - 1):
        longer = ends[ends >= num_matched]
        longer = longer[history[longer - num_matched] == history[-1 - num_matched]]
        if not len(longer):
            break
        ends, num_matched = longer, num_matched + 1
    if not len(ends) or num_matched < least_match:
        return history[:0]
    num_long = int(np.searchsorted(ends, len(history) - most))
    start = int(ends[num_long - 1 if num_long else 0]) + 1
    return history[start : start + most]


class NgramDrafter:
    """Looks each draft up in the sequence's tokens. Implements `Drafter`."""

    is_sent = False
    is_lookup = True
    reads_outputs = False
    num_bytes = 0

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        return [
            continuation(table.known_ids(row), limit) for row, limit in zip(rows.tolist(), most.tolist(), strict=True)
        ]

    def observe(self, table: SequenceTable, rows: Rows, ends: Rows, outputs: Tensor) -> None:
        raise AssertionError("a text is searched without outputs")

    def clear(self) -> None:
        pass
