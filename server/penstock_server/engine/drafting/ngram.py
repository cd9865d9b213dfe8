"""Drafts from the sequence's own text: what followed its last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock_server.engine.drafting.interface import Tokens
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable

MIN_MATCH = 2  # tokens of the end of a text that must occur before
MAX_MATCH = 32  # a longer match does not make a better draft
_MAX_HISTORY = 1 << 15  # last tokens that are searched
_FEW = 64  # occurrences whose matches are measured at once


def longest_match(text: Tokens, end: Tokens, most: int) -> tuple[int, Tokens]:
    """How many of the last tokens of `end`, at most `MAX_MATCH`, occur together in `text` with a token behind them; and
    [≤ most] what follows them there: at their last occurrence with `most` tokens behind it, or else at the first one.

    The time is that of reading `text` once, plus that of `MAX_MATCH` tokens of `_FEW` occurrences.
    """
    limit = min(MAX_MATCH, len(end), len(text))
    ends = np.flatnonzero(text[:-1] == end[-1])  # last tokens of the matches
    ends = ends[text[ends + 1] >= 0]  # what is negative is no token
    num_matched = 1
    while len(ends) > _FEW and num_matched < limit:
        longer = ends[ends >= num_matched]
        longer = longer[text[longer - num_matched] == end[-1 - num_matched]]
        if not len(longer):
            break
        ends, num_matched = longer, num_matched + 1
    if not len(ends):
        return 0, text[:0]
    if len(ends) <= _FEW and num_matched < limit:
        offsets = np.arange(limit)
        places = ends[:, None] - offsets
        is_equal = (text[places] == end[-1 - offsets]) & (places >= 0)
        lengths = is_equal.cumprod(1).sum(1)
        num_matched = int(lengths.max())
        ends = ends[lengths == num_matched]
    num_long = int(np.searchsorted(ends, len(text) - most))
    start = int(ends[num_long - 1 if num_long else 0]) + 1
    return num_matched, text[start : start + most]


def own_match(history: Tokens, most: int) -> tuple[int, Tokens]:
    """Like `longest_match`, for the end of a sequence's tokens in the tokens before it."""
    history = history[-_MAX_HISTORY:]
    return longest_match(history, history, most)


def continuation(history: Tokens, most: int, least_match: int = MIN_MATCH) -> Tokens:
    """[≤ most]: what followed the longest end of `history` where it occurred before. Empty: not even its last
    `least_match` tokens occurred before."""
    num_matched, tokens = own_match(history, most)
    return tokens if num_matched >= least_match else tokens[:0]


class NgramDrafter:
    """Looks each draft up in the sequence's tokens. Implements `Drafter`."""

    is_sent = False
    is_lookup = True
    extends_lookup = False
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
