"""Draft tokens: guesses of what follows, which a step verifies in rows of its own.

The token at a position is a function of the tokens before it, the sampling parameters and the seed. So a draft token is
right exactly if it is the token that is sampled at its position, and the tokens are those of decoding without drafts.
Every rank makes the same drafts, because they are a function of the sequence's tokens. Those of sequences with a
grammar, which only the first rank knows, come from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.engine.batch import Selection
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sampler import BROKEN
from penstock_server.engine.sequence import SequenceTable
from penstock_server.grammar.state import GrammarStates
from penstock_server.parallel import RankGroup

_MIN_MATCH = 2  # tokens of the end of a text that must occur before
_MAX_MATCH = 8  # a longer match does not make a better draft
_MAX_HISTORY = 1 << 15  # last tokens that are searched
_NO_TOKEN = -1

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


def with_drafts(table: SequenceTable, chosen: Selection, grammars: GrammarStates | None, group: RankGroup) -> Selection:
    """Writes drafts behind the known tokens, as far as the plan allows and the texts or grammars suggest them. The step
    computes them, and samples after each. The tokens of all earlier steps must be in the table. grammars: those of the
    first rank, which sends the drafts that they allow to the other ranks."""
    drafts = np.full((len(chosen.rows), int(chosen.max_drafts.max())), _NO_TOKEN, np.int32)
    is_constrained = table.sampling["has_grammar"][chosen.rows] & (chosen.max_drafts > 0)
    for place in np.flatnonzero(chosen.max_drafts).tolist():
        history, most = table.known_ids(int(chosen.rows[place])), int(chosen.max_drafts[place])
        draft: Sequence[int] | Tokens = ()
        if not is_constrained[place]:
            draft = continuation(history, most)
        elif grammars is not None:
            draft = grammars.draft(int(chosen.sequence_ids[place]), history, most, continuation)
        drafts[place, : len(draft)] = draft
    if is_constrained.any():
        group.broadcast(torch.from_numpy(drafts))
    num_drafts = (drafts != _NO_TOKEN).sum(1)
    for place in np.flatnonzero(num_drafts).tolist():
        table.write_drafts(int(chosen.rows[place]), drafts[place, : num_drafts[place]])
    samples = np.repeat(chosen.samples, 1 + num_drafts[chosen.samples])
    return replace(chosen, num_tokens=chosen.num_tokens + num_drafts, samples=samples, num_drafts=num_drafts)


def drafts_of(table: SequenceTable, chosen: Selection) -> list[list[int]]:
    """The draft tokens of each advance that samples, before the step has sampled."""
    places = np.unique(chosen.samples)
    if not chosen.has_drafts:
        return [[] for _ in places]
    rows, counts = chosen.rows[places].tolist(), chosen.num_drafts[places].tolist()
    return [table.drafts(row, count).tolist() for row, count in zip(rows, counts, strict=True)]


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
