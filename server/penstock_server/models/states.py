"""The states that a decoder's layers keep between tokens: slots of sequences and snapshots of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock_server.device.state import CHUNK_TOKENS, RING_TOKENS, StateLayout


class DecoderStates:
    """Implements `States`."""

    chunk_tokens = CHUNK_TOKENS

    def __init__(self, layouts: Mapping[int, StateLayout], caches: list[Tensor], device: torch.device) -> None:
        """layouts: by the index of the layer. caches: of all layers; the slots of these layers are put there."""
        self.reach_tokens = min(RING_TOKENS - layout.window for layout in layouts.values())
        self.bytes_per_slot = sum(layout.slot_bytes for layout in layouts.values())
        self.bytes_per_snapshot = sum(layout.snapshot_bytes for layout in layouts.values())
        self._layouts = layouts
        self._caches = caches
        self._device = device
        self._snapshots: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [self._caches[index] for index in self._layouts] + list(self._snapshots.values())

    def allocate(self, num_slots: int, num_snapshots: int) -> None:
        self._snapshots = {}  # first: the old and the new ones may not fit together
        for index in self._layouts:
            self._caches[index] = torch.empty(0)
        for index, layout in self._layouts.items():
            self._caches[index] = torch.zeros((num_slots, layout.slot), device=self._device)
            self._snapshots[index] = torch.zeros((num_snapshots, layout.snapshot), device=self._device)

    def save(self, slot: int, position: int, snapshot: int) -> None:
        for index, layout in self._layouts.items():
            layout.save(self._caches[index], slot, position, self._snapshots[index], snapshot)

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        for index, layout in self._layouts.items():
            layout.restore(self._snapshots[index], snapshot, self._caches[index], slot, position)
