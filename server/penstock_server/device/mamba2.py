"""Mamba 2 (https://arxiv.org/abs/2405.21060): a state that decays, to which each row adds.

A head's state is a matrix [state_dim, head_dim]. With S the state at the start of the row's chunk, and w(j) the product
of the decays behind row j up to row p, a row p leaves u(p) = dt(p) * x(p) and reads

    o(p) = w(start) * C(p) S + sum over j <= p of w(j) * (C(p) . B(j)) * u(j) + skip * x(p)

where j runs over the rows of the chunk. The next chunk starts with w(start) * S + sum of w(j) * B(j) u(j)^T.

Lightning attention (https://arxiv.org/abs/2401.04658) is the same without convolution, with C, B and x as queries, keys
and values of each head, and with dt = 1, so that decays do not depend on rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock_server.device.state import StateLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One layer on one rank: the part between its projections. The tensors of numbers are float32.

    Each group of B and C serves `num_heads / num_groups` heads that follow each other. "mixed" has x, B and C, which a
    convolution mixes with those of earlier rows, the gates of the outputs, and a time step dt for each head. There may
    be no convolution, no gates and no dt, which is then 1."""

    # Heads that are computed one after the other. Blocks run in parallel, so each has its own B and C in the ring.
    block_heads: ClassVar[int] = 8

    num_groups: int
    state_dim: int
    head_dim: int
    columns: Tensor  # [channels] int64: the columns of "mixed" that the convolution reads, see `convolved_columns`
    conv: Tensor | None  # [channels, width]: its weights; the row's own is last
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [heads]: its rate, above 0
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads]
    dt_limits: tuple[float, float]  # dt is clamped to these
    gate_factor: float = 1.0
    dt_factor: float = 1.0
    has_gates: bool = True
    has_dt: bool = True

    @property
    def num_heads(self) -> int:
        return len(self.decay)

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """Columns of x, B, C, gates and dt in "mixed"."""
        values, keys = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        return values, keys, keys, values * self.has_gates, self.num_heads * self.has_dt

    @property
    def input_widths(self) -> tuple[int]:
        return (sum(self.widths),)

    @property
    def output_width(self) -> int:
        return self.widths[0]

    @property
    def layout(self) -> StateLayout:
        conv_width = 0 if self.conv is None else self.conv.shape[1]
        return state_layout(self.num_heads, self.num_groups, self.state_dim, self.head_dim, conv_width)


def num_blocks(num_heads: int, num_groups: int) -> int:
    """Blocks of the heads of each group."""
    return -(-num_heads // num_groups // Mamba2.block_heads)


def convolved_columns(num_heads: int, num_groups: int, state_dim: int, head_dim: int) -> list[int]:
    """The columns of "mixed" that the convolution reads: x of all heads, then B of each block, then C of each block."""
    values, keys, repeats = num_heads * head_dim, num_groups * state_dim, range(num_blocks(num_heads, num_groups))
    firsts = range(values, values + 2 * keys, state_dim)
    of_blocks = [column for first in firsts for _ in repeats for column in range(first, first + state_dim)]
    return [*range(values), *of_blocks]


def state_layout(num_heads: int, num_groups: int, state_dim: int, head_dim: int, conv_width: int) -> StateLayout:
    """A row has the convolution's inputs, B, u and decays. conv_width: 0 without a convolution."""
    values, keys = num_heads * head_dim, num_groups * num_blocks(num_heads, num_groups) * state_dim
    inputs = values + 2 * keys if conv_width else 0
    return StateLayout(values * state_dim, inputs + keys + values + num_heads, inputs, max(0, conv_width - 1))
