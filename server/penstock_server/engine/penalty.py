"""Processors that change single logits before temperature: penalties on known tokens, biases, forbidden tokens.

They work in place on scores [rows, vocab], and touch only the named logits; `places` are rows of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalize_repetition(scores: Tensor, places: Tensor, seen: Tensor, penalty: Tensor) -> None:
    """Repetition penalty [places] (Keskar et al. 2019, "CTRL") on every token of seen [places, longest], once per
    distinct token."""
    rows, factor = places[:, None], penalty[:, None]
    before = scores[rows, seen]
    scores[rows, seen] = torch.where(before < 0, before * factor, before / factor)


def penalize_counts(
    scores: Tensor, room: Tensor, places: Tensor, generated: tuple[Tensor, Tensor], penalties: tuple[Tensor, Tensor]
) -> None:
    """Frequency and presence penalty, as OpenAI defines them.

    `generated` is (ids [places, longest], whether each is real); `penalties` are (frequency, presence) [places] each.
    `room` is scratch memory of the scores' size.
    """
    rows, (ids, real) = places[:, None], generated
    frequency, presence = (penalty[:, None] for penalty in penalties)
    room[rows, ids] = 0.0
    room.index_put_((rows.expand_as(ids), ids), real.to(room.dtype), accumulate=True)  # integers: exact
    counts = room[rows, ids]
    scores[rows, ids] = scores[rows, ids] - (counts * frequency + (counts > 0) * presence)


def add_biases(scores: Tensor, places: Tensor, ids: Tensor, biases: Tensor) -> None:
    """Add biases [entries]; no (place, id) may occur twice."""
    scores[places, ids] += biases


def forbid(scores: Tensor, places: Tensor, ids: Tensor) -> None:
    """Set the scores of (places, ids) [entries] to -inf, which no later processor undoes."""
    scores[places, ids] = float("-inf")
