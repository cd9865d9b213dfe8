"""What the ranks of one model ask of each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values on all ranks, in place."""
        ...

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """[rows, widths[rank]] of every rank → [rows, sum(widths)] on all of them."""
        ...

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        ...
