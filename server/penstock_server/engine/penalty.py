"""What is done to single logits before temperature: penalties on tokens that were seen, biases, forbidden tokens.

All work in place on scores [rows, vocab] and touch only the logits that they name; `places` are rows of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalize_repetition(scores: Tensor, places: Tensor, seen: Tensor, penalty: Tensor) -> None:
    """Repetition penalty (Keskar et al. 2019, "CTRL") on every token of seen [places, longest], however often it was
    seen; penalty [places]."""
    rows, factor = places[:, None], penalty[:, None]
    before = scores[rows, seen]
    scores[rows, seen] = torch.where(before < 0, before * factor, before / factor)


def penalize_counts(
    scores: Tensor, room: Tensor, places: Tensor, generated: tuple[Tensor, Tensor], penalties: tuple[Tensor, Tensor]
) -> None:
    """Frequency and presence penalty, as OpenAI defines them.

    `generated` is (ids [places, longest], which of them are real); `penalties` are (frequency, presence) [places].
    `room` is as large as scores and is scribbled on.
    """
    rows, (ids, real) = places[:, None], generated
    frequency, presence = (penalty[:, None] for penalty in penalties)
    room[rows, ids] = 0.0
    room.index_put_((rows.expand_as(ids), ids), real.to(room.dtype), accumulate=True)  # whole numbers: exact
    counts = room[rows, ids]
    scores[rows, ids] = scores[rows, ids] - (counts * frequency + (counts > 0) * presence)


def add_biases(scores: Tensor, places: Tensor, ids: Tensor, biases: Tensor) -> None:
    """biases [entries]; no (place, id) stands there twice."""
    scores[places, ids] += biases


def forbid(scores: Tensor, places: Tensor, ids: Tensor) -> None:
    """Nothing brings these back: [entries]."""
    scores[places, ids] = float("-inf")
