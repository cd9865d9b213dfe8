"""What a model gets of an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedImage:
    token_ids: npt.NDArray[np.int32]  # they replace the image's placeholder
    before: npt.NDArray[np.int64]  # [token_ids + 1] the image tokens before each of them; the last entry: all
    embeddings: Tensor  # [image tokens, hidden], or wider: see `VisionTower`
    # Rows and columns of image tokens, if they have positions of their own; then all tokens are image tokens.
    grid: tuple[int, int] | None = None
    # [token_ids] the end of what each token attends to, if image tokens attend to each other, else None.
    ends: npt.NDArray[np.int64] | None = None
    states: Tensor | None = None  # [states, hidden] that are attended to

    @property
    def num_positions(self) -> int:
        """The position of the next token, counted from that of the first."""
        return len(self.token_ids) if self.grid is None else max(self.grid)

    @property
    def num_bytes(self) -> int:
        num_bytes = self.embeddings.nbytes + self.token_ids.nbytes + self.before.nbytes
        return num_bytes + (0 if self.states is None else self.states.nbytes)

    @property
    def num_states(self) -> int:
        return 0 if self.states is None else len(self.states)
