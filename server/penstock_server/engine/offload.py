"""The slots beside the KV pool, to which the scheduler moves the content of evicted blocks: host memory, or a file.

A slot has one block of every layer, byte for byte, so a block that comes back has the bits that it had.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from penstock_server.errors import ConfigError, PlanError
from penstock_server.plan import Transfer


class Offload:
    """The slots of one rank. `caches`: those of the layers, each with the blocks as its first dimension.

    With a folder, the slots are a file in it that has no name, and a checksum of each is kept in memory: what a disk
    gives back is not trusted. Raises ConfigError if the file cannot be made.
    """

    def __init__(self, caches: Sequence[Tensor], num_slots: int, folder: Path | None = None) -> None:
        self._blocks = [cache.view(len(cache), -1).view(torch.uint8) for cache in caches]
        self._widths = [blocks.shape[1] for blocks in self._blocks]
        self._device = self._blocks[0].device
        if self._device.type == "cpu":
            ends = itertools.accumulate(self._widths)
            self._parts = [(b.numpy(), end - b.shape[1], end) for b, end in zip(self._blocks, ends, strict=True)]
        self._checksums: dict[int, int] | None = None if folder is None else {}
        shape, on_gpu = (num_slots, sum(self._widths)), self._device.type != "cpu"
        if folder is None:
            # On a CPU, a page takes no memory until it is written; see `pages`.
            self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu)
        else:
            self._file = _reserve(folder, shape[0] * shape[1])
            self._slots = torch.frombuffer(mmap.mmap(self._file.fileno(), 0), dtype=torch.uint8).view(shape)

    @property
    def pages(self) -> list[Tensor]:
        """The tensors whose pages have to be backed before they are needed: those of slots in host memory."""
        return [self._slots] if self._checksums is None else []

    @torch.inference_mode()
    def move(self, transfers: Sequence[Transfer]) -> None:
        """Make the transfers in their order; on a GPU, in the order of its stream. Raises PlanError for a place that
        does not exist, and RuntimeError for content that has changed in a file."""
        for transfer in transfers:
            if transfer.block_id >= len(self._blocks[0]) or transfer.slot >= len(self._slots):
                raise PlanError(f"{transfer} is beyond {len(self._blocks[0])} blocks and {len(self._slots)} slots")
        for transfer in transfers:
            if transfer.is_load:
                self._load(transfer.slot, transfer.block_id)
            else:
                self._store(transfer.block_id, transfer.slot)

    def _store(self, block_id: int, slot: int) -> None:
        if self._device.type == "cpu":
            # PERF: not torch's copies: their threads wait for each other, on a busy machine for long.
            row = self._slots[slot].numpy()
            for array, begin, end in self._parts:
                row[begin:end] = array[block_id]
        else:
            joined = torch.cat([blocks[block_id] for blocks in self._blocks])  # so that one copy crosses the bus
            self._slots[slot].copy_(joined, non_blocking=True)
        if self._checksums is not None:
            self._checksums[slot] = self._checksum(slot)

    def _load(self, slot: int, block_id: int) -> None:
        if self._checksums is not None and self._checksums[slot] != self._checksum(slot):
            raise RuntimeError(f"slot {slot} of the KV offload file is not what was written: its disk is faulty")
        if self._device.type == "cpu":
            row = self._slots[slot].numpy()
            for array, begin, end in self._parts:
                array[block_id] = row[begin:end]
        else:
            parts = self._slots[slot].to(self._device, non_blocking=True).split(self._widths)
            for blocks, part in zip(self._blocks, parts, strict=True):
                blocks[block_id].copy_(part)

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self._slots[slot].numpy().data)


def _reserve(folder: Path, num_bytes: int) -> IO[bytes]:
    """A file without a name, whose space is taken: a full disk must not end the process at a later write."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the process
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise ConfigError(f"--kv-offload-folder {folder}: cannot reserve {num_bytes} bytes in it: {error}") from error
    return file
