"""Scratch memory for loading."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# PERF: weights are read, checked and packed in pieces of this size. They stay in the CPU cache and have enough rows for
# all threads.
PIECE_BYTES = 8 << 20


class Scratch:
    """Memory that is reused for each piece. PERF: page faults of fresh memory cost more than the work on it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, valid until the next call."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._bytes.numel():
            self._bytes = torch.empty(max(num_bytes, PIECE_BYTES), dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(shape)
