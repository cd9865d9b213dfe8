"""What a model gets of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock_server.device.attention.interface import WrittenImage


@dataclass(slots=True, eq=False)
class ImageStates:
    """What tokens attend to of an image, in models with layers that do."""

    states: Tensor  # [states, hidden]
    kv: Mapping[int, Tensor] | None = None  # see `WrittenImage`; computed alongside the steps, until a step writes it

    def take(self) -> WrittenImage:
        """What a step writes. Keys and values are not kept: from then on they are in the pool."""
        taken = WrittenImage(self.states, self.kv)
        self.kv = None
        return taken

    @property
    def num_bytes(self) -> int:
        return self.states.nbytes + sum(kv.nbytes for kv in (self.kv or {}).values())

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What the router learns of an encoded image."""

    token_ids: npt.NDArray[np.int32]  # see `EncodedImage`
    num_bytes: int  # what it takes of `ImageEncoder.room_bytes`


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedImage:
    token_ids: npt.NDArray[np.int32]  # they replace the image's placeholder
    before: npt.NDArray[np.int64]  # [token_ids + 1] the image tokens before each of them; the last entry: all
    embeddings: Tensor  # [image tokens, hidden], or wider: see `VisionTower`
    # Rows and columns of image tokens, if they have positions of their own; then all tokens are image tokens.
    grid: tuple[int, int] | None = None
    # [token_ids] the end of what each token attends to, if image tokens attend to each other, else None.
    ends: npt.NDArray[np.int64] | None = None
    states: ImageStates | None = None

    @property
    def num_positions(self) -> int:
        """The position of the next token, counted from that of the first."""
        return len(self.token_ids) if self.grid is None else max(self.grid)

    @property
    def num_bytes(self) -> int:
        num_bytes = self.embeddings.nbytes + self.token_ids.nbytes + self.before.nbytes
        return num_bytes + (0 if self.states is None else self.states.num_bytes)
