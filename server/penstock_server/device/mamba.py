"""Mamba (https://arxiv.org/abs/2312.00752): a convolution, and a selective scan whose rates a projection makes of what
was convolved. So these are two nets, each with its own slot.

A channel's state is a vector [state_dim]. With dt(p) = softplus(step(p) + bias), a row p makes of it

    h(p) = exp(-decay * dt(p)) * h(p - 1) + dt(p) * x(p) * B(p)

and its output is (C(p) . h(p) + skip * x(p)) * silu(gate(p)). A row of the ring has dt, dt * x and B, from which the
state is computed again, in the same order, from the start of the chunk on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock_server.device import short_conv
from penstock_server.device.state import StateLayout

if TYPE_CHECKING:
    from torch import Tensor

_LANES = 16  # channels of states and rows are whole vectors of the native kernels


@dataclass(frozen=True, slots=True)
class MambaConv:
    """The convolution of one layer on one rank, and SiLU. Its input has x of all channels, which it convolves, and then
    the gates."""

    conv: Tensor  # [channels, width] float32; the row's own is last
    bias: Tensor  # [channels] float32

    @property
    def channels(self) -> int:
        return len(self.bias)

    @property
    def input_widths(self) -> tuple[int]:
        return (2 * self.channels,)

    @property
    def output_width(self) -> int:
        return self.channels

    @property
    def layout(self) -> StateLayout:
        return short_conv.state_layout(self.channels, self.conv.shape[1])


@dataclass(frozen=True, slots=True)
class MambaScan:
    """The scan of one layer on one rank. Its inputs: what `MambaConv` reads, what it returns, B and C, and the steps of
    all channels. The tensors of numbers are float32."""

    # Channels that are computed one after the other. Parts run in parallel, so each has its own B in the ring.
    part_channels: ClassVar[int] = 128

    decay: Tensor  # [state_dim, channels]: rates, above 0
    dt_bias: Tensor  # [channels]
    skip: Tensor  # [channels]

    @property
    def channels(self) -> int:
        return len(self.skip)

    @property
    def state_dim(self) -> int:
        return len(self.decay)

    @property
    def input_widths(self) -> tuple[int, int, int, int]:
        return 2 * self.channels, self.channels, 2 * self.state_dim, self.channels

    @property
    def output_width(self) -> int:
        return self.channels

    @property
    def layout(self) -> StateLayout:
        return scan_layout(self.channels, self.state_dim)


def padded(channels: int) -> int:
    return -(-channels // _LANES) * _LANES


def num_parts(channels: int) -> int:
    return -(-channels // MambaScan.part_channels)


def scan_layout(channels: int, state_dim: int) -> StateLayout:
    """A row has dt, dt * x, and B for each part. Behind the rows are the state after the last row, and for each part
    the position that follows it."""
    width, parts = padded(channels), num_parts(channels)
    state = width * state_dim
    return StateLayout(state, 2 * width + parts * state_dim, running=state + parts)
