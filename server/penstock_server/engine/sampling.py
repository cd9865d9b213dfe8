"""Sampling parameters as arrays: a record per sequence, and lists of the single logits that some sequences name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from penstock_server.engine import restriction
from penstock_server.engine.restriction import Restriction
from penstock_server.protocol.plan import Sampling

_TYPES = {bool: np.bool_, int: np.int64, float: np.float32}
_WIDER_TYPES = {"seed": np.uint64, "top_p": np.float64, "typical_p": np.float64}
# One column for each scalar of `Sampling`.
SAMPLING_FIELDS = np.dtype(
    [
        *(
            (f.name, _WIDER_TYPES.get(f.name, _TYPES[type(f.default)]))
            for f in fields(Sampling)
            if type(f.default) in _TYPES
        ),
        ("masked", np.bool_),
        ("mask_reads_history", np.bool_),
        ("has_grammar", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits of some rows, in the order of the rows; arrays [entries]."""

    places: npt.NDArray[np.int64]  # row of the batch's logits
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    def within(self, rows: slice) -> Entries:
        """The entries of a range of rows, with places relative to its start."""
        start, stop = np.searchsorted(self.places, (rows.start, rows.stop))
        return Entries(self.places[start:stop] - rows.start, self.ids[start:stop], self.values[start:stop])


@dataclass(frozen=True, slots=True)
class Composition:
    """How each row of a batch is sampled. The same object again means that nothing has changed."""

    records: npt.NDArray[np.void]  # [samples] of SAMPLING_FIELDS
    biases: Entries  # what is added to single logits
    stops: Entries  # tokens that cannot be sampled before `value` tokens were generated
    restrictions: Mapping[int, Restriction] = field(default_factory=dict)  # by row


def record(sampling: Sampling) -> tuple[object, ...]:
    """A record of SAMPLING_FIELDS."""
    return tuple(getattr(sampling, name) for name in SAMPLING_FIELDS.names or ())


def names_tokens(sampling: Sampling) -> bool:
    """Whether it has a bias or a ban on single tokens."""
    return bool(sampling.logit_bias) or (sampling.min_new_tokens > 0 and bool(sampling.stop_token_ids))


def compose(
    records: npt.NDArray[np.void], naming: Mapping[int, Sampling], restrictions: Mapping[int, Restriction] | None = None
) -> Composition:
    """From the rows' records, and by row, ascending, the samplings that name tokens, and the restrictions."""
    biases: list[tuple[int, int, float]] = []
    stops: list[tuple[int, int, float]] = []
    for place, sampling in naming.items():
        sums: dict[int, float] = {}
        for token_id, bias in sampling.logit_bias:
            sums[token_id] = sums.get(token_id, 0.0) + bias
        biases += [(place, token_id, bias) for token_id, bias in sums.items()]
        if sampling.min_new_tokens > 0:
            stops += [(place, token_id, sampling.min_new_tokens) for token_id in sampling.stop_token_ids]
    return Composition(records, _entries(biases), _entries(stops), restrictions or {})


def _entries(rows: list[tuple[int, int, float]]) -> Entries:
    table = np.array(rows, np.float64).reshape(-1, 3)  # ids and places are far below 2**53
    return Entries(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2].astype(np.float32))


def refusal(sampling: Sampling, vocab_size: int) -> str:
    """Why these parameters are invalid; empty: they are valid."""
    if not 0 < sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}, must be above 0 and finite"
    for name in ("top_p", "typical_p"):
        if not 0 < getattr(sampling, name) <= 1:
            return f"{name} is {getattr(sampling, name)}, must be in (0, 1]"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}, must be in [0, 1]"
    if not 0 < sampling.repetition_penalty < math.inf:
        return f"repetition_penalty is {sampling.repetition_penalty}, must be above 0 and finite"
    for name in ("frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            return f"{name} is {getattr(sampling, name)}, must be finite"
    for token_id, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            return f"logit_bias of token {token_id} is {bias}, must be finite"
    named = [token_id for token_id, _ in sampling.logit_bias]
    if sampling.min_new_tokens > 0 or sampling.grammar is not None:
        named += sampling.stop_token_ids
    if named and (max(named) >= vocab_size or min(named) < 0):
        return f"logit_bias or stop_token_ids name token {max(named)}, outside of the vocabulary of {vocab_size}"
    return restriction.refusal(sampling, vocab_size)
