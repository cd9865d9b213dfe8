"""A safetensors checkpoint with quantized weights, seen as one with a tensor for each weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from penstock_server.kernels.quantized import FLOAT8, QuantizedMatrix, QuantizedRows
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.finite import check_finite
from penstock_server.weights.quantization.method import quantized_weights
from penstock_server.weights.quantization.stored import Affine
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint


class QuantizedCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, inner: SafetensorsCheckpoint, options: object) -> None:
        """options: `quantization_config` of config.json. Raises ConfigError as `quantized_weights` does."""
        self._inner = inner
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
        dense = self.weights[name].dense(self._inner.raw)
        out.copy_(dense if part is None else part.of(dense))
        check_finite(out, dense, name, self._inner.path_of(self.weights[name].tensors[0]))

    def has_independent_rows(self, name: str) -> bool:
        return name not in self.weights

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        matrix = self._matrix(name, part)
        return None if matrix is None else (matrix,)

    def _matrix(self, name: str, part: Part | None) -> QuantizedMatrix | None:
        weight = self.weights.get(name)
        if not isinstance(weight, Affine):
            return None
        order, group = weight.order(self._inner.raw), weight.format.group
        rows, columns = (range(size) for size in weight.shape)
        if part is not None and part.dim == 0:
            rows = part.range
        elif part is not None and part.range != columns:
            columns = part.range
            if order is not None or columns.start % group or len(columns) % group:
                return None

        def pieces() -> Iterator[QuantizedRows]:
            mine = weight.rows(self._inner.raw, rows)
            for numbers in mine.numbers:
                check_finite(numbers, numbers, name, self._inner.path_of(weight.tensors[0]))
            if weight.format.code != "integer":
                floats = mine.codes.view(FLOAT8[weight.format.code]).float()
                check_finite(floats, floats, name, self._inner.path_of(weight.tensors[0]))
            yield mine if len(columns) == weight.shape[1] else mine.narrow(columns, group)

        return QuantizedMatrix((len(rows), len(columns)), weight.format, pieces, order)

    def close(self) -> None:
        self._inner.close()
