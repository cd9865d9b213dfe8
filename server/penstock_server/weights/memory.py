"""The memory that loading works in, and giving back what it freed."""

from __future__ import annotations

import ctypes
import math
import sys

import torch
from torch import Tensor

# PERF: weights are read, checked and packed in pieces of so many bytes: they stay in the cache meanwhile, and there are
# enough rows in one for all threads.
PIECE_BYTES = 8 << 20


class Scratch:
    """Memory that is used again and again. PERF: pages that are new cost more than what is done in them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Of any content; it is gone when the next one is asked for."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._bytes.numel():
            self._bytes = torch.empty(max(num_bytes, PIECE_BYTES), dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(shape)


def return_freed_memory() -> None:
    """glibc keeps what was freed between blocks in use, and loading frees as much as it packs."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
