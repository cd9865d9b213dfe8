"""Draft tokens: guesses of what follows, which a step verifies in rows of its own.

The token at a position is a function of the tokens before it, the sampling parameters and the seed. So a draft token is
right exactly if it is the token that is sampled at its position, and the tokens are those of decoding without drafts.
Every rank makes the same drafts, because they are a function of the sequence's tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock_server.engine.batch import Selection
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sampler import BROKEN
from penstock_server.engine.sequence import SequenceTable

_MIN_MATCH = 2  # tokens of the end of a text that must occur before
_MAX_MATCH = 8  # a longer match does not make a better draft
_MAX_HISTORY = 1 << 15  # last tokens that are searched

Tokens = npt.NDArray[np.int32]


def continuation(history: Tokens, most: int) -> Tokens:
    """[≤ most]: what followed the longest end of `history` where it occurred before, at its last occurrence with `most`
    tokens behind it, or else at the first one. Empty: not even its last `_MIN_MATCH` tokens occurred before."""
    history = history[-_MAX_HISTORY:]
    ends = np.flatnonzero(history[:-1] == history[-1])  # last tokens of the matches
    num_matched = 1
    while len(ends) and num_matched < min(_MAX_MATCH, len(history) - 1):
        longer = ends[ends >= num_matched]
        longer = longer[history[longer - num_matched] == history[-1 - num_matched]]
        if not len(longer):
            break
        ends, num_matched = longer, num_matched + 1
    if not len(ends) or num_matched < _MIN_MATCH:
        return history[:0]
    num_long = int(np.searchsorted(ends, len(history) - most))
    start = int(ends[num_long - 1 if num_long else 0]) + 1
    return history[start : start + most]


def with_drafts(table: SequenceTable, chosen: Selection) -> Selection:
    """Writes drafts behind the known tokens, as far as the plan allows and the texts suggest them. The step computes
    them, and samples after each. The tokens of all earlier steps must be in the table."""
    num_drafts = np.zeros(len(chosen.rows), np.int64)
    # The state of a grammar follows the tokens one by one.
    may_draft = (chosen.max_drafts > 0) & ~table.sampling["has_grammar"][chosen.rows]
    for place in np.flatnonzero(may_draft).tolist():
        row = int(chosen.rows[place])
        known = int(table.known[row])
        draft = continuation(table.token_ids[row, :known], int(chosen.max_drafts[place]))
        table.token_ids[row, known : known + len(draft)] = draft
        num_drafts[place] = len(draft)
    samples = np.repeat(chosen.samples, 1 + num_drafts[chosen.samples])
    return replace(chosen, num_tokens=chosen.num_tokens + num_drafts, samples=samples, num_drafts=num_drafts)


def keep_right_drafts(table: SequenceTable, chosen: Selection, positions: Rows, ids: Rows) -> npt.NDArray[np.bool_]:
    """Keeps the drafts before the first wrong one in the table. Returns [samples] which sampled tokens belong to their
    sequence: those that follow no wrong draft. A draft whose own row is broken counts as wrong, so that its sequence
    fails in the step that computes this row without drafts.

    positions, ids [samples]: of the sampled tokens.
    """
    offsets = chosen.offsets()
    rows = chosen.rows[chosen.samples]
    drafts = table.token_ids[rows, positions - 1]  # the input of each row
    is_wrong = (offsets > 0) & ((np.roll(ids, 1) != drafts) | (ids == BROKEN))
    num_wrong = np.cumsum(is_wrong)
    firsts = np.arange(len(ids)) - offsets
    is_kept: npt.NDArray[np.bool_] = num_wrong == num_wrong[firsts]
    num_right = np.bincount(chosen.samples[is_kept & (offsets > 0)], minlength=len(chosen.rows))
    table.known[chosen.rows] += num_right
    table.computed[chosen.rows] -= chosen.num_drafts - num_right
    return is_kept
