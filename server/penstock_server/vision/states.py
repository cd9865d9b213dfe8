"""Images that are attended to (Mllama): an image is one token, and layers of their own attend to its states, which are
hundreds for each tile. Their keys and values are in a pool beside that of the text, in blocks of the same size.

A token sees the images that it follows, up to the last text before them: images next to each other form a run, whose
keys and values are adjacent. Sequences with the same run share it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.errors import ImageError


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """The states of images next to each other in the pool."""

    blocks: list[int]
    block_tokens: int
    unwritten: list[Tensor] = field(default_factory=list)  # [states, hidden] of each image, until a step writes them

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """[slots] of all its blocks."""
        return (np.array(self.blocks)[:, None] * self.block_tokens + np.arange(self.block_tokens)).ravel()

    def take_states(self) -> Tensor:
        """What is unwritten, for the step that writes it."""
        states, self.unwritten = torch.cat(self.unwritten), []
        return states


class StatePool:
    """The blocks of all runs of one rank. All ranks take and free them in the order of the plans, so they agree on
    what fits. Not thread-safe."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks))
        self._alive: WeakValueDictionary[tuple[bytes, ...], Run] = WeakValueDictionary()
        self._kept: dict[tuple[bytes, ...], Run] = {}  # the one that was used last is the last one

    def run(self, hashes: tuple[bytes, ...], states: Sequence[Tensor]) -> Run:
        """The run of these images. It keeps its blocks while it is referenced, and then until others need them. Raises
        ImageError if there is no room."""
        run = self._alive.get(hashes)
        if run is None:
            blocks = self._blocks(-(-sum(map(len, states)) // self.block_tokens))
            run = Run(blocks, self.block_tokens, list(states))
            weakref.finalize(run, self._free.extend, run.blocks)
            self._alive[hashes] = run
        self._kept.pop(hashes, None)
        self._kept[hashes] = run
        return run

    def _blocks(self, count: int) -> list[int]:
        while len(self._free) < count and self._kept:
            del self._kept[next(iter(self._kept))]  # frees it unless a sequence has it
        if len(self._free) < count:
            raise ImageError(
                f"images next to each other need {count} blocks for their keys and values, {len(self._free)} of "
                f"{self.num_blocks} are free; try again later, or send fewer or smaller ones"
            )
        return [self._free.pop() for _ in range(count)]
