"""Images that are attended to (Mllama): an image is one token, and layers of their own attend to its states, which are
hundreds for each tile. Their keys and values are in a pool beside that of the text, in blocks of the same size.

A token sees the images that it follows, up to the last text before them: images next to each other form a group, whose
keys and values are adjacent. Sequences with the same group share it.
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
from penstock_server.vision.encoded import EncodedImage


@dataclass(slots=True, eq=False, weakref_slot=True)
class ImageGroup:
    """The states of images next to each other in the pool."""

    pool: ImageKvPool
    hashes: tuple[bytes, ...]
    blocks: list[int]
    # The images, until a step writes their states. The encoder counts them as used until then.
    unwritten: list[EncodedImage] = field(default_factory=list)

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """[slots] of all its blocks."""
        block_tokens = self.pool.block_tokens
        return (np.array(self.blocks)[:, None] * block_tokens + np.arange(block_tokens)).ravel()

    def take_states(self) -> Tensor:
        """[states, hidden] what is unwritten, for the step that writes it."""
        states = torch.cat([image.states for image in self.unwritten if image.states is not None])
        self.unwritten = []
        self.pool.keep(self)
        return states


class ImageKvPool:
    """The blocks of all groups of one rank. All ranks take and free them in the order of the plans, so they agree on
    what fits. Not thread-safe."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks))
        self._alive: WeakValueDictionary[tuple[bytes, ...], ImageGroup] = WeakValueDictionary()
        self._kept: dict[tuple[bytes, ...], ImageGroup] = {}  # written; the one that was used last is the last one

    def group(self, hashes: tuple[bytes, ...], images: Sequence[EncodedImage]) -> ImageGroup:
        """The group of these images. It keeps its blocks while it is referenced, and then, once it is written, until
        others need them. Raises ImageError if there is no room."""
        group = self._alive.get(hashes)
        if group is None:
            blocks = self._blocks(sum(image.num_states for image in images))
            group = ImageGroup(self, hashes, blocks, list(images))
            weakref.finalize(group, self._free.extend, group.blocks)
            self._alive[hashes] = group
        elif not group.unwritten:
            self.keep(group)
        return group

    def keep(self, group: ImageGroup) -> None:
        """Keeps a written group without references until others need its blocks."""
        self._kept.pop(group.hashes, None)
        self._kept[group.hashes] = group

    def _blocks(self, num_states: int) -> list[int]:
        count = -(-num_states // self.block_tokens)
        needs = f"images next to each other need room for the keys and values of {num_states} states"
        if count > self.num_blocks:
            most = self.num_blocks * self.block_tokens
            raise ImageError(f"{needs}, at most {most} fit; send fewer or smaller ones")
        while len(self._free) < count and self._kept:
            del self._kept[next(iter(self._kept))]  # frees it unless a sequence has it
        if len(self._free) < count:
            most = len(self._free) * self.block_tokens
            raise ImageError(f"{needs}, {most} fit beside those of other requests; try again later")
        return [self._free.pop() for _ in range(count)]
