"""What proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable

Tokens = npt.NDArray[np.int32]


class Drafter(Protocol):
    """Proposes what follows the known tokens of sequences."""

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        """[rows]: the draft of each row of the table, of at most its number of tokens in `most` [rows]. The tokens of
        all earlier steps must be in the table. All ranks must return the same drafts."""
        ...
