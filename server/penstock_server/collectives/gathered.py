"""Collectives of ranks that can only gather. A sum is in the order of the ranks, so that all get the same bits, however
the tensors travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Gathered(ABC):
    """Implements `Collectives`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    @abstractmethod
    def _gather(self, x: Tensor, widths: Sequence[int], joined: Tensor | None = None) -> None:
        """[rows, widths[rank]] of every rank → joined [rows, sum(widths)]; nothing is received without `joined`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._of_all(x)
        x.copy_(first)
        for other in others:
            x += other
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        row = x.view(1, -1)
        widths = [row.shape[1], *[0] * (self._size - 1)]
        if self._rank == 0:
            self._gather(row, widths)
        else:
            self._gather(row[:, :0], widths, row)
        return x

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        joined = x.new_empty((x.shape[0], sum(widths)))
        self._gather(x, widths, joined)
        return joined

    def minimum(self, value: int) -> int:
        return int(self._of_all(torch.tensor([value])).min())

    def _of_all(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]"""
        return self.all_gather_columns(x.view(1, -1), (x.numel(),) * self._size).view(self._size, *x.shape)
