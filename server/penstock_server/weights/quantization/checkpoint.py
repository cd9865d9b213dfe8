"""A safetensors checkpoint with quantized weights, seen as one with a tensor for each weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock_server.device.quantized import FLOAT8, QuantizedMatrix, QuantizedRows
from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.finite import check_finite
from penstock_server.weights.quantization.method import quantized_weights
from penstock_server.weights.quantization.stored import Affine, StoredWeight, TensorError
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint


class QuantizedCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, inner: SafetensorsCheckpoint, options: object) -> None:
        """options: `quantization_config` of config.json. Raises ConfigError as `quantized_weights` does."""
        self._inner = inner
        with self._naming_files():
            _, self.weights = quantized_weights(options, inner.headers, inner.raw, inner.metadata)
        parts = {tensor for weight in self.weights.values() for tensor in weight.tensors}
        self._names = [name for name in inner.names() if name not in parts] + list(self.weights)

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape if name in self.weights else self._inner.shape(name)

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        if name not in self.weights:
            self._inner.read(name, part, out)
            return
        weight = self.weights[name]
        with self._naming_files():
            dense = weight.dense(self._inner.raw)
        self._check_finite(name, weight, dense)
        out.copy_(dense if part is None else part.of(dense))
        check_finite(out, dense, name, self._inner.path_of(weight.tensors[0]))

    def has_independent_rows(self, name: str) -> bool:
        return name not in self.weights

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        matrix = self._matrix(name, part)
        return None if matrix is None else (matrix,)

    def _matrix(self, name: str, part: Part | None) -> QuantizedMatrix | None:
        weight = self.weights.get(name)
        if not isinstance(weight, Affine):
            return None
        with self._naming_files():
            order, group = weight.order(self._inner.raw), weight.format.group
        rows, columns = (range(size) for size in weight.shape)
        if part is not None and part.dim == 0:
            rows = part.range
        elif part is not None and part.range != columns:
            columns = part.range
            if order is not None or columns.start % group or len(columns) % group:
                return None

        def pieces() -> Iterator[QuantizedRows]:
            with self._naming_files():
                mine = weight.rows(self._inner.raw, rows)
            for numbers in mine.numbers:
                self._check_finite(name, weight, numbers)
            if weight.format.code != "integer":
                self._check_finite(name, weight, mine.codes.view(FLOAT8[weight.format.code]).float())
            yield mine if len(columns) == weight.shape[1] else mine.narrow(columns, group)

        return QuantizedMatrix((len(rows), len(columns)), weight.format, pieces, order)

    def _check_finite(self, name: str, weight: StoredWeight, numbers: Tensor) -> None:
        """Raises ConfigError if numbers of the weight are not finite, and names the tensor that they come from."""
        if bool(torch.isfinite(numbers.sum())) or bool(torch.isfinite(numbers).all()):
            return
        for tensor in weight.tensors:
            stored = self._inner.raw(tensor)
            if stored.is_floating_point():
                check_finite(stored.float(), stored.float(), tensor, self._inner.path_of(tensor))
        check_finite(numbers, numbers, name, self._inner.path_of(weight.tensors[0]))

    @contextmanager
    def _naming_files(self) -> Iterator[None]:
        try:
            yield
        except TensorError as error:
            raise ConfigError(f"{self._inner.path_of(error.tensor)}: {error}") from error

    def close(self) -> None:
        self._inner.close()
