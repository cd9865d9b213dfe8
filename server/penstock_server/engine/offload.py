"""The slots beside the KV pool, to which the scheduler moves the content of evicted blocks: in memory, and in a file.

A slot has one block of every layer, byte for byte, so a block that comes back has the bits that it had. Each slot has a
checksum, which is made when its content leaves the pool and compared when it comes back.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from penstock_server.engine import transfer
from penstock_server.engine.pool_blocks import DeviceBlocks, HostBlocks
from penstock_server.errors import ConfigError, PlanError
from penstock_server.protocol.plan import Transfer, TransferKind


class Offload:
    """The slots of one rank: first those in memory, then those in a file in `folder`, which has no name.

    Raises ConfigError if the file cannot be made.
    """

    def __init__(
        self,
        blocks: HostBlocks | DeviceBlocks,
        num_memory_slots: int,
        num_disk_slots: int = 0,
        folder: Path | None = None,
    ) -> None:
        self._blocks = blocks
        # On a CPU, a page takes no memory until it is written; see `pages`.
        is_copied = transfer.is_needed(blocks.device)
        self._memory = torch.empty((num_memory_slots, blocks.width), dtype=torch.uint8, pin_memory=is_copied)
        self._disk = torch.empty((num_disk_slots, 0), dtype=torch.uint8)
        if num_disk_slots and blocks.width:
            if folder is None:
                raise ConfigError(f"{num_disk_slots} slots on disk need --kv-offload-folder")
            self._file = _reserve(folder, num_disk_slots * blocks.width)
            content = torch.frombuffer(mmap.mmap(self._file.fileno(), 0), dtype=torch.uint8)
            self._disk = content.view(num_disk_slots, blocks.width)
        self._checksums = torch.zeros(num_memory_slots + num_disk_slots, dtype=torch.int64, device=blocks.device)
        self._stored: dict[int, torch.cuda.Event] | None = {} if is_copied and num_disk_slots else None

    @property
    def pages(self) -> list[Tensor]:
        """The tensors whose pages have to be backed before they are needed: those of slots in host memory."""
        return [self._memory] if len(self._memory) else []

    @torch.inference_mode()
    def move(self, transfers: Sequence[Transfer]) -> None:
        """Make the transfers in their order; on a GPU, in the order of its stream. Raises PlanError for a place that
        does not exist, and RuntimeError for content that has changed in its slot: on a GPU later, but before the step
        has a result."""
        num_blocks, num_slots = len(self._blocks), len(self._memory) + len(self._disk)
        for move in transfers:
            num_sources = num_blocks if move.kind is TransferKind.STORE else num_slots
            num_targets = num_blocks if move.kind is TransferKind.LOAD else num_slots
            if move.source >= num_sources or move.target >= num_targets:
                raise PlanError(f"{move} is beyond {num_blocks} blocks and {num_slots} slots")
        for move in transfers if self._blocks.width else ():
            match move.kind:
                case TransferKind.STORE:
                    self._store(move.source, move.target)
                case TransferKind.LOAD:
                    self._load(move.source, move.target)
                case TransferKind.DEMOTE:
                    self._demote(move.source, move.target)

    def _store(self, block_id: int, slot: int) -> None:
        self._checksums[slot] = self._blocks.store(block_id, self._row(slot))
        if self._stored is not None:
            self._stored[slot] = transfer.record_event()

    def _load(self, slot: int, block_id: int) -> None:
        place = "memory" if slot < len(self._memory) else "disk"
        fault = f"slot {slot} of the KV offload is not what was written: the {place} is faulty"
        self._blocks.load(self._row(slot), self._checksums[slot], block_id, fault)

    def _demote(self, source: int, target: int) -> None:
        if self._stored is not None:
            self._stored[source].synchronize()  # the device may not have written yet what the host copies
        self._row(target).numpy()[:] = self._row(source).numpy()
        self._checksums[target] = self._checksums[source]

    def _row(self, slot: int) -> Tensor:
        """[width of a block]"""
        num_in_memory = len(self._memory)
        return self._memory[slot] if slot < num_in_memory else self._disk[slot - num_in_memory]


def _reserve(folder: Path, num_bytes: int) -> IO[bytes]:
    """A file without a name, whose space is taken: a full disk must not end the process at a later write."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the process
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise ConfigError(f"--kv-offload-folder {folder}: cannot reserve {num_bytes} bytes in it: {error}") from error
    return file
