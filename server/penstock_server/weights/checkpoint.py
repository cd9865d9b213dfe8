"""The interface of all weight formats: tensors by name, read in parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock_server.device.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous range of one dimension of a tensor."""

    dim: int
    range: range
    view: tuple[int, ...] | None = None  # the shape that `dim` refers to, if the stored tensor merges some dimensions

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor of the given shape."""
        shape = self.view or shape
        return (*shape[: self.dim], len(self.range), *shape[self.dim + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the tensor, as a view."""
        unfolded = tensor if self.view is None else tensor.view(self.view)
        return unfolded.narrow(self.dim, self.range.start, len(self.range))


def split_leading(part: Part | None, size: int) -> tuple[range, Part | None]:
    """Splits a part along the first dimension: the indices it covers there, out of `size`, and the part of each."""
    if part is None:
        return range(size), None
    view = None if part.view is None else part.view[1:]
    return (part.range, None) if part.dim == 0 else (range(size), Part(part.dim - 1, part.range, view))


class Checkpoint(Protocol):
    """The weights of one model. The constructor checks that all files are complete; `close` closes them."""

    def names(self) -> Collection[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        """Fills `out`, a CPU tensor of any floating type, with the tensor or a part of it. Reads only the rows that the
        part covers."""
        ...

    def has_independent_rows(self, name: str) -> bool:
        """Whether any range of the tensor's rows can be read without reading others."""
        ...

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        """A matrix, or a part of it, as it is stored; of a tensor with three dimensions, a matrix for each index of the
        first. None if it is dense, or the part divides a group."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...
