"""Linear layers whose weights stay quantized in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock_server.kernels.ops import Lookup, Ops
from penstock_server.layers.linear import Dense, DenseLinear, DenseWeights, LinearScheme, LinearWeights
from penstock_server.weights.loader import Loader
from penstock_server.weights.quantized import Dequantized, QuantizedMatrix, concatenated


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Implements `LinearWeights`. Operators without kernels for quantized weights get the dense weight."""

    matrices: tuple[QuantizedMatrix, ...]
    bias: Tensor | None
    dtype: torch.dtype
    device: torch.device

    def dense(self) -> tuple[Tensor, Tensor | None]:
        return self._dequantized().dense()

    def reorder(self, rows: Tensor) -> LinearWeights:
        if len({matrix.format for matrix in self.matrices}) > 1:
            return self._dequantized().reorder(rows)
        whole = concatenated([matrix.whole() for matrix in self.matrices]).select(rows.cpu())
        matrix = replace(self.matrices[0], shape=(len(rows), whole.codes.shape[1]), pieces=lambda: iter([whole]))
        return replace(self, matrices=(matrix,), bias=None if self.bias is None else self.bias[rows])

    def without_bias(self) -> QuantizedWeights:
        return replace(self, bias=None)

    def pack(self, ops: Ops, *, gated: bool = False) -> DenseLinear:
        if not ops.keeps_quantized:
            return self._dequantized().pack(ops, gated=gated)
        return DenseLinear(ops.pack_quantized(self.matrices, self.bias, gated=gated)[0])

    def pack_tied(self, ops: Ops) -> tuple[DenseLinear, Lookup]:
        if not ops.keeps_quantized:
            return self._dequantized().pack_tied(ops)
        packed, lookup = ops.pack_quantized(self.matrices, None)
        return DenseLinear(packed), lookup

    def lookup(self) -> Lookup:
        return self._dequantized().lookup()

    def _dequantized(self) -> DenseWeights:
        return DenseWeights(Dequantized(self.matrices, self.dtype, self.device), self.bias)


class Stored(Dense):
    """Weights as the checkpoint stores them: quantized where it can hand them out so, else dense. Implements
    `LinearScheme`."""

    def load(self, loader: Loader, *names: str) -> LinearWeights:
        matrices = loader.quantized(*(f"{name}.weight" for name in names))
        if matrices is None:
            return super().load(loader, *names)
        bias = loader.read_if_there(*(f"{name}.bias" for name in names))
        return QuantizedWeights(matrices, bias, loader.dtype, loader.device)


def stored_everywhere(_name: str) -> LinearScheme:
    """The `SchemeOf` of every checkpoint."""
    return Stored()
