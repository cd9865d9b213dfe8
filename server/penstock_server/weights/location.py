"""Location of a parameter in a checkpoint: the tensor's name, and the rows of a tensor that several parameters share.

Locations are data in an architecture's name map. A rank reads only its own rows of a shared tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock_server.device.quantized import QuantizedMatrix
from penstock_server.weights.checkpoint import Checkpoint, Part, split_leading

EACH = "{e}"


@dataclass(frozen=True, slots=True)
class Strip:
    """A parameter's rows in a fused tensor: `width` rows from `offset` on in every block of `stride` rows."""

    offset: int
    width: int
    stride: int

    def runs(self, rows: range) -> Iterator[range]:
        """The contiguous runs of tensor rows that hold these rows of the parameter, in order."""
        row = rows.start
        while row < rows.stop:
            block, within = divmod(row, self.width)
            count = min(self.width - within, rows.stop - row)
            start = block * self.stride + self.offset + within
            yield range(start, start + count)
            row += count


@dataclass(frozen=True, slots=True)
class Location:
    """The place of one parameter. In `name`, {i} stands for the layer. {e} stands for an index of the parameter's first
    dimension, when the checkpoint has a tensor for each index."""

    name: str
    transposed: bool = False  # the last two dimensions are swapped, as in GPT-2's Conv1D
    strip: Strip | None = None  # the parameter's share of dimension `dim`; None: the tensor holds only this parameter
    dim: int = 0  # a dimension of the parameter, not counting the one that {e} stands for
    ones: tuple[int, int] = (0, 0)  # dimensions of size 1 that the tensor has in front and behind

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """The tensors that hold a parameter of this shape."""
        if EACH not in self.name:
            return [self.name]
        return [self.name.replace(EACH, str(index)) for index in range(shape[0])]

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each of those tensors."""
        sizes = list(shape[1:] if EACH in self.name else shape)
        if self.strip is not None:
            sizes[self.dim] = sizes[self.dim] // self.strip.width * self.strip.stride
        if self.transposed and len(sizes) > 1:
            sizes[-2], sizes[-1] = sizes[-1], sizes[-2]
        front, behind = self.ones
        return (1,) * front + tuple(sizes) + (1,) * behind

    def read(self, checkpoint: Checkpoint, shape: tuple[int, ...], part: Part | None, out: Tensor) -> None:
        """Fills `out` with a parameter of this shape, or with a part of it."""
        if EACH not in self.name:
            self._read_tensor(checkpoint, self.name, shape, part, out)
            return
        indices, part = split_leading(part, shape[0])
        for place, index in enumerate(indices):
            target = out[place] if part is not None else out[place].view(shape[1:])
            self._read_tensor(checkpoint, self.name.replace(EACH, str(index)), shape[1:], part, target)

    def has_independent_rows(self, checkpoint: Checkpoint) -> bool:
        """Whether any range of the parameter's rows can be read without reading others."""
        is_by_rows = EACH not in self.name and not self.transposed and (self.strip is None or self.dim == 0)
        return is_by_rows and checkpoint.has_independent_rows(self.name)

    def matrices(self, shape: tuple[int, ...], part: Part | None) -> list[tuple[str, Part | None]]:
        """The tensors, and the parts of them, that hold this part of a parameter as [..., out_features, in_features];
        none if it is stored otherwise."""
        if self.transposed or len(shape) < 2 or (part is not None and part.view is not None):
            return []
        if EACH in self.name:
            indices, part = split_leading(part, shape[0])
            return [(self.name.replace(EACH, str(index)), part) for index in indices]
        if self.strip is None:
            return [(self.name, part)]
        runs = list(self.strip.runs(range(shape[0]) if part is None else part.range))
        is_in_one_run = self.dim == 0 and len(runs) == 1 and (part is None or part.dim == 0)
        return [(self.name, Part(0, runs[0]))] if is_in_one_run else []

    def quantized(
        self, checkpoint: Checkpoint, shape: tuple[int, ...], part: Part | None
    ) -> tuple[QuantizedMatrix, ...] | None:
        """This part of a parameter as the checkpoint stores it, a matrix for each index of its leading dimension if it
        has one; None if it is dense, or not stored as matrices."""
        found: list[QuantizedMatrix] = []
        for name, its_part in self.matrices(shape, part):
            matrices = checkpoint.quantized(name, its_part)
            if matrices is None:
                return None
            found += matrices
        return tuple(found) or None

    def _read_tensor(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], part: Part | None, out: Tensor
    ) -> None:
        if any(self.ones):
            front, behind = self.ones
            moved = None if part is None else replace(part, dim=part.dim + front)
            checkpoint.read(name, moved, out.view((1,) * front + tuple(out.shape) + (1,) * behind))
            return
        if self.strip is None:
            checkpoint.read(name, self._transpose_part(part, len(shape)), self._transpose(out))
            return
        rows = range(shape[self.dim])
        if part is not None:
            assert part.dim == self.dim, "a fused tensor is split along the dimension it is fused in"
            rows = part.range
        if self.strip.width == 1 and self.strip.stride > 1 and len(rows):
            # PERF: a read for every single row is slow. Read the whole span and keep every `stride`-th row.
            first, last = next(self.strip.runs(rows[:1])).start, next(self.strip.runs(rows[-1:])).start
            span = Part(self.dim, range(first, last + 1))
            wide = torch.empty(span.shape_of(tuple(out.shape)), dtype=out.dtype)
            checkpoint.read(name, self._transpose_part(span, len(shape)), self._transpose(wide))
            kept = torch.arange(0, len(span.range), self.strip.stride)
            out.copy_(wide.index_select(self.dim, kept))
            return
        place = 0
        for run in self.strip.runs(rows):
            target = out.narrow(self.dim, place, len(run))
            checkpoint.read(name, self._transpose_part(Part(self.dim, run), len(shape)), self._transpose(target))
            place += len(run)

    def _transpose(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(-1, -2) if self.transposed and tensor.dim() > 1 else tensor

    def _transpose_part(self, part: Part | None, num_dims: int) -> Part | None:
        if part is None or not self.transposed or num_dims < 2 or part.dim < num_dims - 2:
            return part
        return replace(part, dim=2 * num_dims - 3 - part.dim)


class Locator(Protocol):
    """Finds every parameter of a model in a checkpoint."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions that match the full names of tensors that the model never reads."""
        ...

    def locate(self, parameter: str) -> Location:
        """The location of a parameter, given by our name."""
        ...


def fused(
    prefix: str, name: str, widths: Mapping[str, int], blocks: int = 1, *, transposed: bool = False, dim: int = 0
) -> dict[str, Location]:
    """The locations of parameters {prefix}.{key} that share a tensor, in this order within each of its `blocks` blocks.

    widths: the total rows of each parameter. With one block, the parameters follow each other. With a block for each KV
    head, a block holds one head's q, k and v, or a group's queries with its k and v.
    """
    stride = sum(widths.values()) // blocks
    locations: dict[str, Location] = {}
    offset = 0
    for key, width in widths.items():
        strip = Strip(offset, width // blocks, stride)
        locations[f"{prefix}.{key}"] = Location(name, transposed, strip, dim)
        offset += width // blocks
    return locations
