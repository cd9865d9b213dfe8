"""A safetensors checkpoint with quantized weights, seen as one with a tensor for each weight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

from penstock_server.kernels.quantized import QuantizedMatrix, QuantizedRows
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.finite import check_finite
from penstock_server.weights.quantization.method import method_of
from penstock_server.weights.quantization.stored import Affine, StoredWeight
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint


class QuantizedCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, inner: SafetensorsCheckpoint, options: object) -> None:
        """options: `quantization_config` of config.json. Raises ConfigError as `method_of` and `Method.find` do."""
        self._inner = inner
        shapes = {name: inner.shape(name) for name in inner.names()}
        dtypes = {name: entry.place.dtype for name, entry in inner.entries.items()}
        method = method_of(options, dtypes, inner.raw)
        self.method = method.name
        self.weights: dict[str, StoredWeight] = method.find(shapes)
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

        def rows() -> QuantizedRows:
            found = weight.rows(self._inner.raw)
            for numbers in found.numbers:
                check_finite(numbers, numbers, name, self._inner.path_of(weight.tensors[0]))
            return found

        whole = QuantizedMatrix((weight.shape[0], weight.shape[1]), weight.format, lambda: iter([rows()]), order)
        if part is None:
            return whole
        if part.dim == 0:
            mine = slice(part.range.start, part.range.stop)
            return replace(whole, shape=(len(part.range), whole.shape[1]), pieces=lambda: iter([rows().select(mine)]))
        is_whole = part.range.start == 0 and part.range.stop == whole.shape[1]
        if is_whole or order is not None or part.range.start % group or len(part.range) % group:
            return whole if is_whole else None
        columns = part.range
        return replace(
            whole, shape=(whole.shape[0], len(columns)), pieces=lambda: iter([rows().narrow(columns, group)])
        )

    def close(self) -> None:
        self._inner.close()
