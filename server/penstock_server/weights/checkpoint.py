"""One interface over the weight formats: tensors by name, read slice by slice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.folder import find_weights

if TYPE_CHECKING:
    from penstock_server.weights.loader import NameSource


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of one dimension."""

    dim: int
    range: range
    view: tuple[int, ...] | None = (
        None  # the shape that `dim` counts in, where the tensor has folded dimensions into one
    )

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = self.view or shape
        return (*shape[: self.dim], len(self.range), *shape[self.dim + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """A view."""
        unfolded = tensor if self.view is None else tensor.view(self.view)
        return unfolded.narrow(self.dim, self.range.start, len(self.range))


def by_index(part: Part | None, size: int) -> tuple[range, Part | None]:
    """Which indexes of the first dimension, of this size, a part has, and which part of what is at each of them."""
    if part is None:
        return range(size), None
    return (part.range, None) if part.dim == 0 else (range(size), Part(part.dim - 1, part.range))


class Checkpoint(Protocol):
    """The weights of one model. Opening checks that the files are whole; they are open until `close`."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def own_names(self) -> NameSource | None:
        """Where its parameters are, where the format has names of its own; None: under Hugging Face's."""
        ...

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        """Fills `out`, on the CPU and in any floating type, with the tensor or a part of it. Reads no rows of
        which the part has nothing."""
        ...

    def can_cut(self, name: str) -> bool:
        """Whether any of the tensor's rows can be read without the others."""
        ...

    def close(self) -> None: ...


def open_checkpoint(folder: Path) -> Checkpoint:
    """Raises ConfigError when there are no weights, or a file is truncated or damaged."""
    files = find_weights(folder)
    if files.kind == "bin":
        raise ConfigError(f"{folder} is not prepared: its weights are PyTorch's pickles, which are converted first")
    if files.kind == "gguf":
        from penstock_server.weights.gguf_file import GgufCheckpoint

        return GgufCheckpoint(files.paths[0])
    from penstock_server.weights.safetensors_file import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.paths, files.weight_map)
