"""Fills a model's parameters from a checkpoint, and proves that no tensor is missing and none is left over.

A table lists the parameters with their full shapes and the part that this rank holds. The checkpoint's reader knows no
architecture, and the layers know no tensor names of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.quantized import ALL_KEPT, Kept, QuantizedMatrix, stays_quantized
from penstock_server.errors import ConfigError
from penstock_server.weights import kv_scale
from penstock_server.weights.checkpoint import Checkpoint, Part
from penstock_server.weights.location import Locator
from penstock_server.weights.memory import PIECE_BYTES, Scratch

MAX_NAMES_SHOWN = 5
LEFTOVERS = (
    # Tables and constants that follow from the configuration, as old exporters saved them.
    r"(.+\.)?rotary(_pos)?(_emb)?\.(inv_freq|cos_cached|sin_cached)",
    r"(.+\.)?masked_bias",
    # The value head of reinforcement learning, and counters of a profiler (thop). transformers ignores both.
    r"v_head\..+",
    r"(.+\.)?total_(ops|params)",
)
"""Tensors that no model computes with."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model."""

    shape: tuple[int, ...]  # over all ranks
    part: Part | None = None  # what this rank holds; None: all of it
    is_wide: bool = False  # kept in float32 in a float16 model, because its values exceed the range of float16
    dtype: torch.dtype | None = None  # in a model of any; None: the model's
    # Never kept quantized in memory: another matrix is computed from it, or its layers are multiplied together.
    is_dense: bool = False
    layer: str = ""  # the layer that it is a part of with other parameters, one below the other; empty: it is all of it
    is_reordered: bool = False  # the layer's rows are brought into another order

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.shape if self.part is None else self.part.shape_of(self.shape)

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """The parameter's dtype in a model of the given dtype."""
        if self.dtype is not None:
            return self.dtype
        return torch.float32 if self.is_wide and dtype == torch.float16 else dtype


class Loader:
    """Hands out each parameter once. Raises ConfigError at once when the checkpoint does not match the table."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Parameter],
        locator: Locator,
        dtype: torch.dtype,
        device: torch.device,
        kept: Kept = ALL_KEPT,
        held: Collection[str] | None = None,
    ) -> None:
        """kept: which quantized weights the operators take. held: the parameters that this rank reads; None: all."""
        self.checkpoint = checkpoint
        self.locator = locator
        self.parameters = parameters
        self.locations = {name: locator.locate(name) for name in parameters}
        self.dtype = dtype
        self.device = device
        self.kept = kept
        self.unfilled = set(parameters if held is None else held)
        self.loaded_bytes = 0
        self._scratch = Scratch()
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
        expected = expected_shapes(parameters, locator)
        zeros = {name for name in unused_biases(shapes, expected) if is_zero(checkpoint, name)}
        problems = mismatches({name: shapes[name] for name in shapes.keys() - zeros}, expected, locator.ignored)
        if problems:
            raise ConfigError(problems[0])

    def read(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of a parameter, on the device; of several parameters, their parts concatenated by rows.

        dtype: overrides the model's dtype.
        """
        parameters = [self.parameters[name] for name in names]
        shapes = [parameter.local_shape for parameter in parameters]
        rows = [shape[0] for shape in shapes]
        fused = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype or parameters[0].dtype_in(self.dtype))
        for name, out in zip(names, fused.split(rows), strict=True):
            self.unfilled.remove(name)
            parameter = self.parameters[name]
            self.locations[name].read(self.checkpoint, parameter.shape, parameter.part, out)
        self.loaded_bytes += fused.nbytes
        return fused.to(self.device)

    def unread(self, *names: str) -> UnreadRows:
        """Like `read`, but of matrices, and read only when asked for, whole or piece by piece."""
        parameters = [self.parameters[name] for name in names]
        rows = sum(parameter.local_shape[0] for parameter in parameters)
        shape = (rows, *parameters[0].local_shape[1:])
        return UnreadRows(self, names, shape, parameters[0].dtype_in(self.dtype))

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yields this rank's part of a matrix, a few rows at a time, on the CPU. Each piece overwrites the previous."""
        parameter, location = self.parameters[name], self.locations[name]
        (num_rows, num_columns), dtype = parameter.local_shape, parameter.dtype_in(self.dtype)
        part = parameter.part or Part(0, range(num_rows))
        step = PIECE_BYTES // max(1, num_columns * dtype.itemsize)
        can_split = part.dim == 0 and part.view is None and location.has_independent_rows(self.checkpoint)
        if step == 0 or not can_split:
            yield self.read(name)
            return
        self.unfilled.remove(name)
        for first in range(0, num_rows, step):
            rows = part.range[first : first + step]
            piece = self._scratch.tensor((len(rows), num_columns), dtype)
            location.read(self.checkpoint, parameter.shape, Part(0, rows), piece)
            self.loaded_bytes += piece.nbytes
            yield piece

    def quantized(self, *names: str) -> list[tuple[QuantizedMatrix, ...]] | None:
        """This rank's part of these parameters as the checkpoint stores them, to be read once: a matrix of each
        parameter, or one for each index of their leading dimension. None unless all are quantized, can be handed
        out so, and stay so as one layer."""
        found = []
        for name in names:
            parameter = self.parameters[name]
            matrices = self.locations[name].quantized(self.checkpoint, parameter.shape, parameter.part)
            if matrices is None:
                return None
            found.append(matrices)
        layers = list(zip(*found, strict=True))
        is_reordered = self.parameters[names[0]].is_reordered
        if not all(
            stays_quantized([(each.format, each.order) for each in layer], self.kept, is_reordered=is_reordered)
            for layer in layers
        ):
            return None
        self.unfilled -= set(names)
        self.loaded_bytes += sum(matrix.num_bytes for matrices in found for matrix in matrices)
        return layers

    def read_if_there(self, *names: str) -> Tensor | None:
        """Like `read`; None when the model has no such parameters. It must have all of them or none."""
        there = [name in self.parameters for name in names]
        assert all(there) or not any(there)
        return self.read(*names) if all(there) else None

    def finish(self) -> None:
        """Closes the checkpoint. Call it when the model is built: every parameter must have been read by then."""
        assert not self.unfilled, f"the model did not ask for {shortened(self.unfilled)}"
        self.checkpoint.close()


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """This rank's rows of some parameters, concatenated, to be read once. Implements `LazyWeight`."""

    loader: Loader
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self) -> Iterator[Tensor]:
        """Yields the rows in pieces, as `Loader.pieces` does."""
        for name in self.names:
            yield from self.loader.pieces(name)

    def whole(self) -> Tensor:
        """All rows, on the device."""
        return self.loader.read(*self.names)


def expected_shapes(parameters: Mapping[str, Parameter], locator: Locator) -> dict[str, tuple[int, ...]]:
    """The names of the tensors that a checkpoint must hold for these parameters, and their shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        location = locator.locate(name)
        shapes |= dict.fromkeys(location.names(parameter.shape), location.tensor_shape(parameter.shape))
    return shapes


def unused_biases(found: Collection[str], expected: Collection[str]) -> set[str]:
    """Tensors that are biases of weights which the model adds no bias to. AutoGPTQ and other quantizers store zeros
    there; they change nothing."""
    return {
        name
        for name in found
        if name.endswith(".bias") and name not in expected and f"{name.removesuffix('.bias')}.weight" in expected
    }


def is_zero(checkpoint: Checkpoint, name: str) -> bool:
    """Whether all of a tensor's values are zeros."""
    values = torch.empty(checkpoint.shape(name))
    checkpoint.read(name, None, values)
    return not bool(values.any())


def mismatches(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]
) -> list[str]:
    """Every difference between a checkpoint's tensor shapes and the expected ones, as messages for the user. found:
    without biases of zeros, see `unused_biases`."""
    problems = []
    patterns = [re.compile(pattern) for pattern in (*ignored, *LEFTOVERS, kv_scale.PATTERN)]
    missing = expected.keys() - found.keys()
    extra = {name for name in found.keys() - expected.keys() if not any(p.fullmatch(name) for p in patterns)}
    biases = extra & unused_biases(found, expected)
    extra -= biases
    if missing:
        problems.append(f"the checkpoint lacks {len(missing)} of {len(expected)} tensors: {shortened(missing)}")
    if extra:
        problems.append(
            f"the checkpoint holds {len(extra)} tensors that the model has no place for: {shortened(extra)}"
        )
    if biases:
        problems.append(
            f"the checkpoint holds {len(biases)} biases of layers that have none in this model: {shortened(biases)}; "
            "they are not zeros, so results without them would be wrong; if the model has them, config.json must say "
            "so, for example as attention_bias or mlp_bias"
        )
    different = [name for name, shape in expected.items() if found.get(name, shape) != shape]
    for name in different[:MAX_NAMES_SHOWN]:
        problems.append(
            f"tensor {name} has shape {list(found[name])} in the checkpoint, but config.json implies "
            f"{list(expected[name])}"
        )
    if len(different) > MAX_NAMES_SHOWN:
        problems.append(f"{len(different) - MAX_NAMES_SHOWN} more tensors have other shapes than config.json implies")
    return problems


def shortened(names: Iterable[str]) -> str:
    """The names in alphabetical order, only the first few when there are many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMES_SHOWN} more" if len(ordered) > MAX_NAMES_SHOWN else ""
    return ", ".join(ordered[:MAX_NAMES_SHOWN]) + more
