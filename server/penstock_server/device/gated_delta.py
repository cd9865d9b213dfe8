"""Gated delta networks (https://arxiv.org/abs/2412.06464): a state that decays and is corrected by each row.

A head's state is a matrix [key_dim, value_dim]. With S the state at the start of the row's chunk, and w(j) the product
of the decays behind row j up to row p, a row p reads and leaves

    u(p) = beta(p) * (v(p) - w(start) * k(p) S - sum over j < p of w(j) * (k(p) . k(j)) * u(j))
    o(p) =                   w(start) * q(p) S + sum over j <= p of w(j) * (q(p) . k(j)) * u(j)

where j runs over the rows of the chunk. The next chunk starts with w(start) * S + sum of w(j) * k(j) u(j)^T.

Kimi Linear (https://arxiv.org/abs/2510.26692) has a decay for each element of the keys: w is a vector, which multiplies
k(j), and for w(start) the row's own key or query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_server.device.state import StateLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One layer on one rank: the part between its projections. Tensors are float32 where nothing else is said.

    "mixed" has the queries, keys and
    values, which a convolution mixes with those of earlier rows, and output gates; "rates" has for each head a number
    that says how much is corrected, and then for each its numbers for decays. These are the inputs."""

    num_key_heads: int
    key_dim: int
    key_heads: Tensor  # [heads] int64: the key head that serves each head
    conv: Tensor  # [channels, width]: weights of the convolution over queries, keys and values; the row's own is last
    decay: Tensor  # [heads]: its rate, above 0
    decay_bias: Tensor  # [heads * decays of a head], which has one, or one for each element of its keys
    norm: Tensor  # [value_dim]: weight of the outputs' RMSNorm
    eps: float
    strength: float = 1.0  # the largest beta
    # The lowest logarithm of a decay: it is this times a sigmoid; None: softplus times the rate, without a limit.
    decay_floor: float | None = None
    has_sigmoid_gates: bool = False  # outputs are gated by sigmoids, otherwise by silu
    is_apart: bool = False  # decays and gates are inputs of their own, the third and the fourth

    @property
    def num_heads(self) -> int:
        return len(self.decay)

    @property
    def value_dim(self) -> int:
        return len(self.norm)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Columns of queries, keys, values and output gates in "mixed"."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return keys, keys, values, values

    @property
    def decay_dim(self) -> int:
        """Decays of a head."""
        return len(self.decay_bias) // self.num_heads

    @property
    def input_widths(self) -> tuple[int, ...]:
        decays, gates = len(self.decay_bias), self.widths[3]
        if self.is_apart:
            return sum(self.widths[:3]), self.num_heads, decays, gates
        return sum(self.widths), self.num_heads + decays

    @property
    def output_width(self) -> int:
        return self.widths[2]

    @property
    def layout(self) -> StateLayout:
        dims = self.key_dim, self.value_dim, self.decay_dim
        return state_layout(self.num_heads, self.num_key_heads, *dims, self.conv.shape[1])


def state_layout(
    num_heads: int, num_key_heads: int, key_dim: int, value_dim: int, decay_dim: int, conv_width: int
) -> StateLayout:
    """A row has the convolution's inputs, normed keys, corrected values and decays."""
    keys, values, decays = num_key_heads * key_dim, num_heads * value_dim, num_heads * decay_dim
    inputs = 2 * keys + values
    return StateLayout(num_heads * key_dim * value_dim, inputs + keys + values + decays, inputs, conv_width - 1)
