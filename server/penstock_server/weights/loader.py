"""Fills a model's parameters from a checkpoint, and proves that nothing is missing and nothing is left over.

The parameters are a table: each owns its full shape and which part of it this rank holds. The checkpoint's reader knows
no architecture, the layers know no checkpoint's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Checkpoint, Part
from penstock_server.weights.memory import PIECE_BYTES, Scratch
from penstock_server.weights.source import Source

NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model."""

    shape: tuple[int, ...]  # over all ranks
    part: Part | None = None  # what this rank holds; None: all of it
    is_wide: bool = False  # kept in float32 where the model's dtype is float16, whose range is too narrow for it

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shape if self.part is None else self.part.shape_of(self.shape)

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """Its dtype in a model of such a dtype."""
        return torch.float32 if self.is_wide and dtype == torch.float16 else dtype


class NameSource(Protocol):
    """Where a checkpoint keeps a parameter, and what in it is never needed."""

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def source(self, parameter: str) -> Source: ...


class Loader:
    """Hands out each parameter once. Raises ConfigError at once when checkpoint and parameters do not fit together."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Parameter],
        names: NameSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.checkpoint = checkpoint
        self.parameters = parameters
        self.sources = {name: names.source(name) for name in parameters}
        self.dtype = dtype
        self.device = device
        self.unfilled = set(parameters)
        self.loaded_bytes = 0
        self._scratch = Scratch()
        tensors = {name: self.sources[name].names(parameter.shape) for name, parameter in parameters.items()}
        wanted = [tensor for several in tensors.values() for tensor in several]
        _check_names(checkpoint.names(), wanted, names.ignored)
        for name, parameter in parameters.items():
            expected = self.sources[name].tensor_shape(parameter.shape)
            for tensor in tensors[name]:
                shape = checkpoint.shape(tensor)
                if shape != expected:
                    raise ConfigError(
                        f"tensor {tensor} has shape {list(shape)} in the checkpoint, "
                        f"but config.json makes it {list(expected)}"
                    )

    def read(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of a parameter, on the device; of several, their parts one behind the other. dtype: where it
        is not the model's."""
        parameters = [self.parameters[name] for name in names]
        shapes = [parameter.local_shape for parameter in parameters]
        rows = [shape[0] for shape in shapes]
        fused = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype or parameters[0].dtype_in(self.dtype))
        for name, out in zip(names, fused.split(rows), strict=True):
            self.unfilled.remove(name)
            parameter = self.parameters[name]
            self.sources[name].read(self.checkpoint, parameter.shape, parameter.part, out)
        self.loaded_bytes += fused.nbytes
        return fused.to(self.device)

    def unread(self, *names: str) -> UnreadRows:
        """The same of matrices, for who reads it piece by piece."""
        parameters = [self.parameters[name] for name in names]
        rows = sum(parameter.local_shape[0] for parameter in parameters)
        shape = (rows, *parameters[0].local_shape[1:])
        return UnreadRows(self, names, shape, parameters[0].dtype_in(self.dtype))

    def pieces(self, name: str) -> Iterator[Tensor]:
        """This rank's part of a matrix, some rows at a time, on the CPU. The next piece overwrites the last."""
        parameter, source = self.parameters[name], self.sources[name]
        (num_rows, num_columns), dtype = parameter.local_shape, parameter.dtype_in(self.dtype)
        part = parameter.part or Part(0, range(num_rows))
        step = PIECE_BYTES // max(1, num_columns * dtype.itemsize)
        if part.dim != 0 or part.view is not None or step == 0 or not source.can_cut(self.checkpoint):
            yield self.read(name)
            return
        self.unfilled.remove(name)
        for first in range(0, num_rows, step):
            rows = part.range[first : first + step]
            piece = self._scratch.tensor((len(rows), num_columns), dtype)
            source.read(self.checkpoint, parameter.shape, Part(0, rows), piece)
            self.loaded_bytes += piece.nbytes
            yield piece

    def read_if_there(self, *names: str) -> Tensor | None:
        """None when the model has no such parameters. Of several it has all or none."""
        there = [name in self.parameters for name in names]
        assert all(there) or not any(there)
        return self.read(*names) if all(there) else None

    def finish(self) -> None:
        """To be called when the model is built: every parameter must have found its place."""
        assert not self.unfilled, f"the model did not ask for {_some(self.unfilled)}"
        self.checkpoint.close()


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """This rank's rows of parameters, one behind the other, to be read once. Implements `Unread`."""

    loader: Loader
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self) -> Iterator[Tensor]:
        for name in self.names:
            yield from self.loader.pieces(name)

    def whole(self) -> Tensor:
        return self.loader.read(*self.names)


def _check_names(there: Iterable[str], wanted: Iterable[str], ignored: tuple[str, ...]) -> None:
    there, wanted = set(there), set(wanted)
    missing = wanted - there
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {_some(missing)}")
    patterns = [re.compile(pattern) for pattern in ignored]
    extra = {name for name in there - wanted if not any(pattern.fullmatch(name) for pattern in patterns)}
    if extra:
        raise ConfigError(f"the checkpoint holds {len(extra)} tensors that the model has no place for: {_some(extra)}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more
