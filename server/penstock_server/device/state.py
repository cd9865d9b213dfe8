"""What layers keep of a sequence between tokens instead of keys and values: a state at the start of each chunk of
positions, and what the rows since then have left behind. Imports no torch.

A slot holds, in float32, two states, a ring of rows, and for some layers a running state. The state at the start of
chunk c is in half c % 2; the row of position p is row p % (2 * CHUNK_TOKENS) of the ring. The last row of a chunk also
computes the next chunk's state, into the half that it does not read. So a sequence may go back by up to CHUNK_TOKENS
positions, as it does after rejected drafts: what it reads there is still in the slot.

INVARIANT: a row's arithmetic depends on its position and on what came before, never on what else is in the step. A row
of the first chunk does not read a state, nor rows before position 0, so a slot needs no initialization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_TOKENS = 16  # CHUNK of every build of the native kernels
RING_TOKENS = 2 * CHUNK_TOKENS
ITEM_BYTES = 4  # the numbers are float32


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences that the rows of a step belong to."""

    query_starts: Tensor  # these as of `StepBatch`
    context_lens: Tensor
    slots: Tensor  # `StepBatch.state_slots`


class Recurrence(Protocol):
    """What a layer that keeps a state computes between its projections: its parameters on one rank."""

    @property
    def input_widths(self) -> Sequence[int]:
        """Columns of each input."""
        ...

    @property
    def output_width(self) -> int: ...

    @property
    def layout(self) -> StateLayout: ...


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Numbers of a slot of one layer, which are float32: two states, the ring of rows, and a running state."""

    state: int  # numbers of a state
    row: int  # numbers of a row
    inputs: int = 0  # the leading numbers of a row that rows of the next chunk read: inputs of a convolution
    window: int = 0  # the last rows whose inputs a row reads; at most CHUNK_TOKENS
    running: int = 0  # numbers of what native kernels keep behind the last row, to begin there and not at its chunk

    @property
    def slot(self) -> int:
        return 2 * self.state + RING_TOKENS * self.row + self.running

    @property
    def slot_bytes(self) -> int:
        return ITEM_BYTES * self.slot

    @property
    def snapshot_bytes(self) -> int:
        return ITEM_BYTES * self.snapshot

    @property
    def snapshot(self) -> int:
        """The state at the start of a chunk, and the inputs of the rows before."""
        return self.state + self.window * self.inputs

    def states(self, slots: Tensor) -> Tensor:
        """[slots, slot] → [slots, 2, state]"""
        return slots[:, : 2 * self.state].unflatten(1, (2, self.state))

    def rows(self, slots: Tensor) -> Tensor:
        """[slots, slot] → [slots, RING_TOKENS, row]"""
        rows = slots[:, 2 * self.state : self.slot - self.running]
        return rows.unflatten(1, (RING_TOKENS, self.row))

    def save(self, slots: Tensor, slot: int, position: int, snapshots: Tensor, snapshot: int) -> None:
        """Copies what a sequence needs to continue at `position`, a multiple of CHUNK_TOKENS, from slots [slots, slot]
        to snapshots [snapshots, snapshot]. Its last step ended there, or at most a chunk later."""
        for inside, part in self._parts(slots, slot, position, snapshots, snapshot):
            part.copy_(inside)

    def restore(self, snapshots: Tensor, snapshot: int, slots: Tensor, slot: int, position: int) -> None:
        """Copies a snapshot of `position` to the slot of a sequence that continues there."""
        for inside, part in self._parts(slots, slot, position, snapshots, snapshot):
            inside.copy_(part)

    def _parts(
        self, slots: Tensor, slot: int, position: int, snapshots: Tensor, snapshot: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The parts of a slot that make a snapshot, and where they are in it."""
        assert position > 0
        assert position % CHUNK_TOKENS == 0
        one, other = slots[slot : slot + 1], snapshots[snapshot]
        state, inputs = other[: self.state], other[self.state :].view(self.window, self.inputs)
        first = (position - self.window) % RING_TOKENS  # the window does not cross the end of the ring
        rows = self.rows(one)[0, first : first + self.window, : self.inputs]
        return [(self.states(one)[0, position // CHUNK_TOKENS % 2], state), (rows, inputs)]
