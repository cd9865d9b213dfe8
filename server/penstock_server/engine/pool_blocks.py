"""The blocks of the KV pool as bytes, which are copied out of it and back, with a checksum of each copy.

All layers of a block are one row: [width] uint8 in host memory.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def pool_blocks(caches: Sequence[Tensor], num_blocks: int, device: torch.device) -> HostBlocks | DeviceBlocks:
    """`caches`: those of the layers, each with the blocks as its first dimension. A stage whose layers keep states only
    has none, and its blocks have no bytes."""
    return (HostBlocks if device.type == "cpu" else DeviceBlocks)(caches, num_blocks, device)


class HostBlocks:
    """Blocks of a CPU. Their checksum is the CRC-32."""

    def __init__(self, caches: Sequence[Tensor], num_blocks: int, device: torch.device) -> None:
        self.device = device
        self._num_blocks = num_blocks
        parts = _bytes_of(caches)
        ends = list(itertools.accumulate(part.shape[1] for part in parts))
        self.width = ends[-1] if ends else 0
        # PERF: not torch's copies: their threads wait for each other, on a busy machine for long.
        self._parts = [(part.numpy(), end - part.shape[1], end) for part, end in zip(parts, ends, strict=True)]

    def __len__(self) -> int:
        return self._num_blocks

    def store(self, block_id: int, row: Tensor) -> int:
        """Copies a block into the row. Returns its checksum."""
        array = row.numpy()
        for part, begin, end in self._parts:
            array[begin:end] = part[block_id]
        return zlib.crc32(array.data)

    def load(self, row: Tensor, checksum: Tensor, block_id: int, fault: str) -> None:
        """Copies the row into a block. Raises RuntimeError(fault) if its content is not what `store` copied."""
        array = row.numpy()
        if zlib.crc32(array.data) != int(checksum):
            raise RuntimeError(fault)
        for part, begin, end in self._parts:
            part[block_id] = array[begin:end]


class DeviceBlocks:
    """Blocks of a GPU, copied in the order of its stream: to and from page-locked rows without waiting for it.

    The GPU computes the checksums, so they cover the way over the bus, too. PERF: a CPU's core would take longer for a
    CRC-32 than the bus for the copy.
    """

    def __init__(self, caches: Sequence[Tensor], num_blocks: int, device: torch.device) -> None:
        self.device = device
        self._num_blocks = num_blocks
        self._parts = _bytes_of(caches)
        self._widths = [part.shape[1] for part in self._parts]
        self.width = sum(self._widths)
        # A word that changes, and two different words that change places, always change the sum.
        self._factors = torch.arange(1, self.width // 4 + 1, device=self.device)

    def __len__(self) -> int:
        return self._num_blocks

    def store(self, block_id: int, row: Tensor) -> Tensor:
        """Copies a block into the row. Returns its checksum, [] int64."""
        joined = torch.cat([part[block_id] for part in self._parts])  # so that one copy crosses the bus
        row.copy_(joined, non_blocking=True)
        return self._checksum(joined)

    def load(self, row: Tensor, checksum: Tensor, block_id: int, fault: str) -> None:
        """Copies the row into a block. If its content is not what `store` copied, the device prints the fault and
        stops, so waiting for any later result raises RuntimeError."""
        joined = row.to(self.device, non_blocking=True)
        torch._assert_async(self._checksum(joined) == checksum, fault)
        for part, copied in zip(self._parts, joined.split(self._widths), strict=True):
            part[block_id].copy_(copied)

    def _checksum(self, joined: Tensor) -> Tensor:
        return (joined.view(torch.int32) * self._factors).sum()


def _bytes_of(caches: Sequence[Tensor]) -> list[Tensor]:
    return [cache.view(len(cache), -1).view(torch.uint8) for cache in caches]
