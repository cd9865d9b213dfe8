"""Rows of a sequence in one chunk, and its slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.state import CHUNK_TOKENS, RING_TOKENS, StateLayout


@dataclass(frozen=True, slots=True)
class Chunk:
    layout: StateLayout
    slot: Tensor  # [layout.slot]
    position: int  # the first row's
    num_rows: int

    @property
    def within(self) -> int:
        """The place of the first row in the chunk."""
        return self.position % CHUNK_TOKENS

    @property
    def rows(self) -> Tensor:
        """[within + num_rows, row]: the rows of the ring from the chunk's start to the last row."""
        first = self.position % RING_TOKENS - self.within
        return self._ring[first : first + self.within + self.num_rows]

    @property
    def state(self) -> Tensor:
        """[state]: at the chunk's start."""
        index = self.position // CHUNK_TOKENS
        return self._states[index % 2] if index else torch.zeros_like(self._states[0])

    @property
    def next_state(self) -> Tensor | None:
        """[state]: where the state behind the chunk is to be stored; None: the chunk does not end with these rows."""
        ends = self.within + self.num_rows == CHUNK_TOKENS
        return self._states[(self.position // CHUNK_TOKENS + 1) % 2] if ends else None

    def convolved(self, weights: Tensor) -> Tensor:
        """What a convolution with weights [channels, width] makes of the rows' inputs, which are in the ring:
        [num_rows, channels]. Inputs before the first position are zeros."""
        places = torch.arange(self.position - self.layout.window, self.position + self.num_rows, device=weights.device)
        inputs = self._ring[places % RING_TOKENS, : self.layout.inputs].where((places >= 0)[:, None], 0.0)
        return F.conv1d(inputs.T, weights[:, None], groups=self.layout.inputs).T

    @property
    def _states(self) -> Tensor:
        return self.layout.states(self.slot[None])[0]

    @property
    def _ring(self) -> Tensor:
        return self.layout.rows(self.slot[None])[0]


def decays_between(decays: Tensor) -> Tensor:
    """decays [rows, heads] → [heads, rows p, rows j]: the product of those behind row j up to row p; 0 for j > p."""
    steps = decays.T[:, :, None].expand(-1, -1, len(decays))
    is_behind = torch.ones_like(steps[0]).tril(-1).bool()
    return torch.where(is_behind, steps, 1.0).cumprod(1).tril()
