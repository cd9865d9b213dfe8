"""Where a checkpoint keeps a parameter: under which name, and where in a tensor that several parameters share.

Sources are data in an architecture's name map. A rank reads of a shared tensor only the parameters' parts it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock_server.weights.checkpoint import Checkpoint, Part, by_index

EACH = "{e}"


@dataclass(frozen=True, slots=True)
class Strip:
    """A parameter's rows in a fused tensor: from `offset` on, `width` of every `stride` rows."""

    offset: int
    width: int
    stride: int

    def runs(self, rows: range) -> Iterator[range]:
        """The tensor's rows that are these rows of the parameter, piece by piece."""
        row = rows.start
        while row < rows.stop:
            block, within = divmod(row, self.width)
            count = min(self.width - within, rows.stop - row)
            start = block * self.stride + self.offset + within
            yield range(start, start + count)
            row += count


@dataclass(frozen=True, slots=True)
class Source:
    """One parameter's place. {i} in the name stands for the layer; {e} for the index in the parameter's first
    dimension, where each index is a tensor of its own."""

    name: str
    transposed: bool = False  # the last two dimensions are swapped, as in GPT-2's Conv1D
    strip: Strip | None = None  # of the dimension `dim`; None: the tensor is the parameter's alone
    dim: int = 0  # counted in the parameter, without the one that {e} stands for

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """The tensors that a parameter of this shape is made of."""
        if EACH not in self.name:
            return [self.name]
        return [self.name.replace(EACH, str(index)) for index in range(shape[0])]

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of those tensors."""
        sizes = list(shape[1:] if EACH in self.name else shape)
        if self.strip is not None:
            sizes[self.dim] = sizes[self.dim] // self.strip.width * self.strip.stride
        if self.transposed and len(sizes) > 1:
            sizes[-2], sizes[-1] = sizes[-1], sizes[-2]
        return tuple(sizes)

    def read(self, checkpoint: Checkpoint, shape: tuple[int, ...], part: Part | None, out: Tensor) -> None:
        """Fills `out` with a parameter of this shape, or with a part of it."""
        if EACH not in self.name:
            self._read_tensor(checkpoint, self.name, shape, part, out)
            return
        indexes, part = by_index(part, shape[0])
        for place, index in enumerate(indexes):
            self._read_tensor(checkpoint, self.name.replace(EACH, str(index)), shape[1:], part, out[place])

    def can_cut(self, checkpoint: Checkpoint) -> bool:
        """Whether any of the parameter's rows can be read without the others."""
        is_by_rows = EACH not in self.name and not self.transposed and (self.strip is None or self.dim == 0)
        return is_by_rows and checkpoint.can_cut(self.name)

    def _read_tensor(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], part: Part | None, out: Tensor
    ) -> None:
        if self.strip is None:
            checkpoint.read(name, self._turned(part, len(shape)), self._turn(out))
            return
        rows = range(shape[self.dim])
        if part is not None:
            assert part.dim == self.dim, "a fused tensor is split along the dimension it is fused in"
            rows = part.range
        if self.strip.width == 1 and self.strip.stride > 1 and len(rows):
            # One by one would be a read for every row: all between are read, and thinned out.
            first, last = next(self.strip.runs(rows[:1])).start, next(self.strip.runs(rows[-1:])).start
            between = Part(self.dim, range(first, last + 1))
            wide = torch.empty(between.shape_of(tuple(out.shape)), dtype=out.dtype)
            checkpoint.read(name, self._turned(between, len(shape)), self._turn(wide))
            picks = torch.arange(0, len(between.range), self.strip.stride)
            out.copy_(wide.index_select(self.dim, picks))
            return
        place = 0
        for run in self.strip.runs(rows):
            target = out.narrow(self.dim, place, len(run))
            checkpoint.read(name, self._turned(Part(self.dim, run), len(shape)), self._turn(target))
            place += len(run)

    def _turn(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(-1, -2) if self.transposed and tensor.dim() > 1 else tensor

    def _turned(self, part: Part | None, num_dims: int) -> Part | None:
        if part is None or not self.transposed or num_dims < 2 or part.dim < num_dims - 2:
            return part
        return replace(part, dim=2 * num_dims - 3 - part.dim)


def fused(
    prefix: str, name: str, widths: Mapping[str, int], blocks: int = 1, *, transposed: bool = False, dim: int = 0
) -> dict[str, Source]:
    """The sources of parameters {prefix}.{key} that lie in one tensor, in this order, in each of its `blocks` blocks.

    widths: each parameter's rows in all. One block: one parameter behind the other. As many blocks as KV heads: each
    block is a head's q, k and v, or a group's queries with its k and v.
    """
    stride = sum(widths.values()) // blocks
    sources: dict[str, Source] = {}
    offset = 0
    for key, width in widths.items():
        strip = Strip(offset, width // blocks, stride)
        sources[f"{prefix}.{key}"] = Source(name, transposed, strip, dim)
        offset += width // blocks
    return sources
