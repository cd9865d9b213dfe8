"""A model without arithmetic that keeps a state between tokens: its next token is a function of this state alone."""

from __future__ import annotations

import torch
from fake_model import BLOCK_TOKENS, START, FakeModel, extended, token_of
from penstock_server.device.attention.interface import StepBatch
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from torch import Tensor

CHUNK_TOKENS = BLOCK_TOKENS
_RING = 2 * CHUNK_TOKENS


class FakeStates:
    """A slot has the states at the starts of two chunks of tokens, this one and the one before or after it, and the
    tokens of both."""

    chunk_tokens = CHUNK_TOKENS
    reach_tokens = 2 * CHUNK_TOKENS - 1
    bytes_per_slot = 8 * (2 + _RING)
    bytes_per_snapshot = 8

    def __init__(self) -> None:
        self.allocate(0, 0)

    def allocate(self, num_slots: int, num_snapshots: int) -> None:
        self.slots = torch.full((num_slots, 2 + _RING), -1)
        self.snapshots = torch.full((num_snapshots,), -1)
        self.tensors = [self.slots, self.snapshots]

    def save(self, slot: int, position: int, snapshot: int) -> None:
        assert position % CHUNK_TOKENS == 0
        self.snapshots[snapshot] = self.slots[slot, position // CHUNK_TOKENS % 2]

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        assert position % CHUNK_TOKENS == 0
        self.slots[slot] = -1
        self.slots[slot, position // CHUNK_TOKENS % 2] = self.snapshots[snapshot]

    def step(self, slot: int, position: int, token: int) -> int:
        """Computes a token. Returns the state behind it."""
        row, chunk = self.slots[slot], position // CHUNK_TOKENS
        if position == 0:
            row[0] = START
        row[2 + position % _RING] = token
        state = int(row[chunk % 2])
        for place in range(chunk * CHUNK_TOKENS, position + 1):
            state = extended(state, int(row[2 + place % _RING]))
        if (position + 1) % CHUNK_TOKENS == 0:
            row[(chunk + 1) % 2] = state
        return state


class FakeStateModel(FakeModel):
    """Computes the tokens of `fake_model.continuation`."""

    states: FakeStates  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.states = FakeStates()

    def allocate_cache(self, num_blocks: int) -> None:
        super().allocate_cache(num_blocks)
        self.caches = [self.cache, self.states.slots]

    def forward(self, batch: StepBatch) -> Tensor:
        super().forward(batch)
        assert batch.state_slots is not None
        found = torch.zeros(len(batch.token_ids), dtype=torch.int64)
        for sequence, slot in enumerate(batch.state_slots.tolist()):
            for row in range(*batch.query_starts[sequence : sequence + 2].tolist()):
                state = self.states.step(slot, int(batch.positions[row]), int(batch.token_ids[row]))
                found[row] = token_of(state)
        return found[batch.sample_rows][:, None]


def load_fake_states(options: LoadOptions, group: RankGroup) -> FakeStateModel:
    return FakeStateModel()
