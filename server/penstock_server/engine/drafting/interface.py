"""What proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable

Tokens = npt.NDArray[np.int32]


class Drafter(Protocol):
    """Proposes what follows the known tokens of sequences."""

    is_sent: bool  # the first rank sends its drafts to the others; otherwise all ranks make the same
    is_lookup: bool  # in the sequence's text, which grammars look up themselves
    extends_lookup: bool  # is asked only where lookup finds nothing, and reads no text before it drafts
    reads_outputs: bool
    num_bytes: int  # bytes of the weights

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        """[rows]: the draft of each row of the table, of at most its number of tokens in `most` [rows]. The tokens of
        all earlier steps must be in the table. On a GPU nothing else is in flight, so a drafter may wait for it."""
        ...

    def observe(self, table: SequenceTable, rows: Rows, ends: Rows, outputs: Tensor) -> None:
        """Takes the model's outputs [rows, hidden] from which the tokens in front of `ends` [rows] were sampled:
        the last known ones of each row, unless a step in flight has sampled more. Called if `reads_outputs`."""
        ...

    def clear(self) -> None:
        """Forgets all sequences."""
        ...


class SentDrafter:
    """Stands for the first rank's drafter on the others. Implements `Drafter`."""

    is_sent = True
    is_lookup = False
    extends_lookup = False
    reads_outputs = False
    num_bytes = 0

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        return [np.zeros(0, np.int32) for _ in rows]

    def observe(self, table: SequenceTable, rows: Rows, ends: Rows, outputs: Tensor) -> None:
        raise AssertionError("only the first rank reads outputs")

    def clear(self) -> None:
        pass
