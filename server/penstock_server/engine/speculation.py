"""Draft tokens: guesses of what follows, which a step verifies in rows of its own.

The token at a position is a function of the tokens before it, the sampling parameters and the seed. So a draft token is
right exactly if it is the token that is sampled at its position, and the tokens are those of decoding without drafts.
Every rank makes the same drafts, see `Drafter`. Those of sequences with a grammar, which only the first rank knows,
come from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.engine.batch import Selection
from penstock_server.engine.drafting import ngram
from penstock_server.engine.drafting.interface import Drafter
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sampler import BROKEN
from penstock_server.engine.sequence import SequenceTable
from penstock_server.grammar.state import GrammarStates
from penstock_server.parallel import RankGroup

_NO_TOKEN = -1


def with_drafts(
    table: SequenceTable,
    chosen: Selection,
    drafters: Sequence[Drafter],
    grammars: GrammarStates | None,
    group: RankGroup,
    device: torch.device,
) -> Selection:
    """Writes drafts behind the known tokens, as far as the plan allows and a drafter or grammars suggest them. The
    step computes them, and samples after each. The tokens of all earlier steps must be in the table. drafters: each
    drafts for the sequences that have no draft yet. grammars: those of the first rank, which sends the drafts that
    they allow to the other ranks. device: of the model."""
    drafts = np.full((len(chosen.rows), int(chosen.max_drafts.max())), _NO_TOKEN, np.int32)
    by_model = np.zeros(len(chosen.rows), np.bool_)
    has_grammar, may_draft = table.sampling["has_grammar"][chosen.rows], chosen.max_drafts > 0
    for drafter in drafters:
        is_missing = may_draft & (drafts[:, 0] == _NO_TOKEN)
        asked = np.flatnonzero(is_missing & ~(has_grammar & drafter.is_lookup))
        found = drafter.draft(table, chosen.rows[asked], chosen.max_drafts[asked])
        proposed = {place: draft.tolist() for place, draft in zip(asked.tolist(), found, strict=True)}
        if grammars is not None:
            for place in np.flatnonzero(is_missing & has_grammar).tolist():
                sequence_id, most = int(chosen.sequence_ids[place]), int(chosen.max_drafts[place])
                history, expected = table.known_ids(int(chosen.rows[place])), proposed.get(place, [])
                proposed[place] = grammars.draft(sequence_id, history, most, ngram.continuation, expected)
        for place, draft in proposed.items():
            drafts[place, : len(draft)] = draft
            by_model[place] |= bool(draft) and not drafter.is_lookup
    is_sent = any(drafter.is_sent for drafter in drafters)
    differs = not (group.computes_alike or drafters[-1].is_lookup)  # between ranks that all draft
    if (has_grammar & may_draft).any() or is_sent or differs:
        drafts = _sent(drafts, group, device)
    return replace(_with_rows(table, chosen, drafts), by_model=by_model)


def with_forced_tokens(
    table: SequenceTable,
    chosen: Selection,
    grammars: GrammarStates | None,
    group: RankGroup,
    device: torch.device,
) -> Selection:
    """Like `with_drafts`, but drafts only tokens that grammars force."""
    drafts = np.full((len(chosen.rows), int(chosen.max_drafts.max())), _NO_TOKEN, np.int32)
    if grammars is not None:
        for place in np.flatnonzero(table.sampling["has_grammar"][chosen.rows] & (chosen.max_drafts > 0)).tolist():
            forced = grammars.forced(int(chosen.sequence_ids[place]), int(chosen.max_drafts[place]))
            drafts[place, : len(forced)] = forced
    return _with_rows(table, chosen, _sent(drafts, group, device))


def _sent(drafts: npt.NDArray[np.int32], group: RankGroup, device: torch.device) -> npt.NDArray[np.int32]:
    """The drafts of the first rank, on all ranks. GPUs exchange tensors that they hold."""
    if group.size == 1:
        return drafts
    return group.broadcast(torch.from_numpy(drafts).to(device)).cpu().numpy()


def _with_rows(table: SequenceTable, chosen: Selection, drafts: npt.NDArray[np.int32]) -> Selection:
    """Writes drafts [selected, most] behind the known tokens, and gives each a row of the step."""
    num_drafts = (drafts != _NO_TOKEN).sum(1)
    for place in np.flatnonzero(num_drafts).tolist():
        table.write_drafts(int(chosen.rows[place]), drafts[place, : num_drafts[place]])
    samples = np.repeat(chosen.samples, 1 + num_drafts[chosen.samples])
    return replace(
        chosen,
        num_tokens=chosen.num_tokens + num_drafts,
        samples=samples,
        num_drafts=num_drafts,
        has_drafts=bool(num_drafts.any()),
    )


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
