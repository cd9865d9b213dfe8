"""Images that are attended to (Mllama): an image is one token, and layers of their own attend to its states, which are
hundreds for each tile. Their keys and values are in a pool beside that of the text, in blocks of the same size.

A token sees the images that it follows, up to the last text before them: images next to each other form a group, whose
keys and values are adjacent. Sequences with the same group share it.

Keys and values are computed beside the steps, right after the image is encoded, as long as there is room for them; the
first step that sees a group copies them into the pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock_server.device.attention.interface import WrittenImage
from penstock_server.errors import ImageError
from penstock_server.vision.encoded import EncodedImage

Project = Callable[[Tensor], Mapping[int, Tensor]]
"""The states of an image [states, hidden] → their keys and values, as in `WrittenImage`."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ImageGroup:
    """The states of images next to each other in the pool."""

    pool: ImageKvPool
    hashes: tuple[bytes, ...]
    num_states: tuple[int, ...]  # states of each image
    blocks: list[int]
    # The images, until a step writes their states. The encoder counts them as used until then.
    unwritten: list[EncodedImage] = field(default_factory=list)

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """[states]"""
        block_tokens = self.pool.block_tokens
        slots = (np.array(self.blocks)[:, None] * block_tokens + np.arange(block_tokens)).ravel()
        return slots[: sum(self.num_states)]

    def take_states(self) -> list[WrittenImage]:
        """What is unwritten, for the step that writes it."""
        states = [image.states.take() for image in self.unwritten if image.states is not None]
        self.unwritten = []
        self.pool.keep(self)
        return states


class ImageKvPool:
    """The blocks of all groups of one rank. The router plans only sequences whose groups fit together. Only the thread
    of the steps changes it."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        block_bytes: int,
        state_bytes: int,
        projected_bytes: int,
        project: Project,
    ) -> None:
        """block_bytes: of a block in all caches of this rank, which may have a smaller data type than what `project`
        returns. state_bytes: of the keys and values of a state in all heads, whatever rank has them. projected_bytes:
        of what `project` returns for a state."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.state_bytes = state_bytes
        self.projected_bytes = projected_bytes
        self.project = project
        self._free = list(range(num_blocks))
        self._alive: WeakValueDictionary[tuple[bytes, ...], ImageGroup] = WeakValueDictionary()
        self._kept: dict[tuple[bytes, ...], ImageGroup] = {}  # written; the one that was used last is the last one

    @property
    def num_bytes(self) -> int:
        """On this rank."""
        return self.num_blocks * self.block_bytes

    def bytes_of(self, num_states: int) -> int:
        """What these states take on this rank; together with others, less than the sum."""
        return -(-num_states // self.block_tokens) * self.block_bytes

    @property
    def room_bytes(self) -> int:
        """On all ranks together."""
        return self.room_of(self.num_blocks * self.block_tokens)

    def room_of(self, num_states: int) -> int:
        """What these states take of `room_bytes`. Servers pass it to each other, so it is the same in every layout of
        ranks."""
        return -(-num_states // self.block_tokens) * self.block_tokens * self.state_bytes

    def has_written(self, hash_: bytes) -> bool:
        """Whether a written group has the image. Any thread may call it; the answer may change at any time."""
        return any(hash_ in hashes for hashes in list(self._kept))

    def find(self, hashes: tuple[bytes, ...]) -> ImageGroup | None:
        """The group of these images, if it is there. A group keeps its blocks while it is referenced, and then, once it
        is written, until others need them."""
        group = self._alive.get(hashes)
        if group is not None and not group.unwritten:
            self.keep(group)
        return group

    def add(self, hashes: tuple[bytes, ...], images: Sequence[EncodedImage]) -> ImageGroup:
        """A new group. Raises ImageError if there is no room, which the scheduler prevents."""
        num_states = tuple(len(image.states) for image in images if image.states is not None)
        group = ImageGroup(self, hashes, num_states, self._blocks(sum(num_states)), list(images))
        weakref.finalize(group, self._free.extend, group.blocks)
        self._alive[hashes] = group
        return group

    def keep(self, group: ImageGroup) -> None:
        """Keeps a written group without references until others need its blocks."""
        self._kept.pop(group.hashes, None)
        self._kept[group.hashes] = group

    def _blocks(self, num_states: int) -> list[int]:
        count = -(-num_states // self.block_tokens)
        while len(self._free) < count and self._kept:
            del self._kept[next(iter(self._kept))]  # frees it unless a sequence has it
        if len(self._free) < count:
            most = len(self._free) * self.block_tokens
            raise ImageError(f"images next to each other have {num_states} states, but only {most} fit")
        return [self._free.pop() for _ in range(count)]
