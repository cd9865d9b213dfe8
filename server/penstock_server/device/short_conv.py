"""Short convolutions between two gates (https://arxiv.org/abs/2511.23404): what a row reads of earlier rows is a few of
their inputs, and there is no state besides.

A row's input has three numbers b, c and x for each channel. The row leaves b * x, and its output is c times the
convolution of this over the last rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_server.device.state import StateLayout

if TYPE_CHECKING:
    from torch import Tensor

_LANES = 16  # rows of the ring are whole vectors of the native kernels


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One layer on one rank: the part between its projections. Its input has b of all channels, then c, then x."""

    conv: Tensor  # [channels, width] float32; the row's own is last
    bias: Tensor  # [channels] float32

    @property
    def channels(self) -> int:
        return len(self.bias)

    @property
    def input_widths(self) -> tuple[int]:
        return (3 * self.channels,)

    @property
    def output_width(self) -> int:
        return self.channels

    @property
    def layout(self) -> StateLayout:
        return state_layout(self.channels, self.conv.shape[1])


def state_layout(channels: int, width: int) -> StateLayout:
    return StateLayout(state=0, row=-(-channels // _LANES) * _LANES, inputs=channels, window=width - 1)
