"""Linear layers whose weights stay quantized in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock_server.device.ops import Lookup, Ops, PackedLinear, QuantizedPacker, pieces_of
from penstock_server.device.quantized import Dequantized, QuantFormat, QuantizedMatrix, QuantizedRows, concatenated
from penstock_server.layers.linear import (
    Arrange,
    Dense,
    DenseWeights,
    LinearScheme,
    LinearWeights,
    OrderedLinear,
    load_dense,
    load_each_dense,
)
from penstock_server.weights.loader import Loader


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Implements `LinearWeights`, of matrices that `stays_quantized` lets be one layer."""

    matrices: tuple[QuantizedMatrix, ...]
    bias: Tensor | None
    dtype: torch.dtype
    device: torch.device

    def dense(self) -> tuple[Tensor, Tensor | None]:
        return self._dequantized().dense()

    def reorder(self, rows: Tensor) -> LinearWeights:
        whole = concatenated([matrix.whole() for matrix in self.matrices]).select(rows.cpu())
        matrix = replace(self.matrices[0], shape=(len(rows), whole.codes.shape[1]), pieces=lambda: iter([whole]))
        return replace(self, matrices=(matrix,), bias=None if self.bias is None else self.bias[rows])

    def without_bias(self) -> QuantizedWeights:
        return replace(self, bias=None)

    def pack(self, ops: Ops, *, gated: bool = False) -> PackedLinear:
        first = self.matrices[0].order
        packed, _ = _packer(ops)(self.matrices, self.bias, gated=gated)
        return packed if first is None else OrderedLinear(packed, first.to(self.device))

    def pack_tied(self, ops: Ops) -> tuple[PackedLinear, Lookup]:
        if not self._is_in_order:
            return self._dequantized().pack_tied(ops)
        return _packer(ops)(self.matrices, None)

    def lookup(self, ops: Ops) -> Lookup:
        if not self._is_in_order:
            return self._dequantized().lookup(ops)
        return _packer(ops)(self.matrices, None)[1]

    @property
    def _is_in_order(self) -> bool:
        return all(matrix.order is None for matrix in self.matrices)

    def _dequantized(self) -> DenseWeights:
        return DenseWeights(Dequantized(self.matrices, self.dtype, self.device), self.bias)


def _packer(ops: Ops) -> QuantizedPacker:
    packer = ops.quantized_packer
    assert packer is not None, "without kernels for them, quantized weights are dequantized at load"
    return packer


class Stored(Dense):
    """Weights as the checkpoint stores them: quantized where it can hand them out so, else dense. Implements
    `LinearScheme`."""

    def load(self, loader: Loader, *names: str) -> LinearWeights:
        found = loader.quantized(*(f"{name}.weight" for name in names))
        if found is None:
            return load_dense(loader, *names)
        bias = loader.read_if_there(*(f"{name}.bias" for name in names))
        dtype = loader.parameters[f"{names[0]}.weight"].dtype_in(loader.dtype)
        return QuantizedWeights(found[0], bias, dtype, loader.device)

    def load_each(self, loader: Loader, names: Sequence[str], arrange: Arrange) -> Iterator[LinearWeights]:
        found = loader.quantized(*(f"{name}.weight" for name in names))
        if found is None:
            yield from load_each_dense(loader, names, arrange)
            return
        dtype = loader.parameters[f"{names[0]}.weight"].dtype_in(loader.dtype)
        biases = [loader.read_if_there(f"{name}.bias") for name in names]
        for index, matrices in enumerate(found):
            its_biases = [bias[index] for bias in biases if bias is not None]
            bias = torch.cat(its_biases) if its_biases else None
            yield QuantizedWeights(matrices, bias, dtype, loader.device)


@dataclass(frozen=True, slots=True)
class AtLoad(Dense):
    """Dense weights quantized at load. Implements `LinearScheme`."""

    format: QuantFormat  # one of AT_LOAD

    def load(self, loader: Loader, *names: str) -> LinearWeights:
        return _quantized(load_dense(loader, *names), loader, self.format)

    def load_each(self, loader: Loader, names: Sequence[str], arrange: Arrange) -> Iterator[LinearWeights]:
        for weights in load_each_dense(loader, names, arrange):
            yield _quantized(weights, loader, self.format)


def _quantized(weights: DenseWeights, loader: Loader, format_: QuantFormat) -> QuantizedWeights:
    """The weights as they are packed. `loaded_bytes` counts them instead of the dense ones."""
    weight = weights.weight
    shape = (weight.shape[0], weight.shape[1])
    quantize: Callable[[Tensor], QuantizedRows]
    if format_.table is not None:
        quantize = partial(quantized_to_table, format_=format_)
    else:
        format_ = replace(format_, group=-(-shape[1] // 32) * 32)  # a row
        quantize = quantized_to_8_bits if format_.code == "integer" else quantized_to_float8
    matrix = QuantizedMatrix(shape, format_, lambda: map(quantize, pieces_of(weight)))
    loader.loaded_bytes += matrix.num_bytes - math.prod(shape) * weight.dtype.itemsize
    return QuantizedWeights((matrix,), weights.bias, weight.dtype, loader.device)


def quantized_to_8_bits(rows: Tensor) -> QuantizedRows:
    """[rows, in_features] in floating point → codes 1 to 255 around 128; a row's greatest magnitude is 127 scales."""
    scales = rows.float().abs().amax(1, keepdim=True) / 127
    codes = (rows.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).round() + 128
    return QuantizedRows(codes.to(torch.uint8), scales)


def quantized_to_float8(rows: Tensor) -> QuantizedRows:
    """[rows, in_features] in floating point → codes in e4m3fn; a row's greatest magnitude is 448 scales."""
    scales = rows.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes = (rows.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).to(torch.float8_e4m3fn)
    return QuantizedRows(codes.view(torch.uint8), scales)


def quantized_to_table(rows: Tensor, format_: QuantFormat) -> QuantizedRows:
    """[rows, in_features] in floating point → codes of the nearest numbers of the format's table; a group's greatest
    magnitude is that of the table."""
    assert format_.table is not None
    numbers, codes = torch.tensor(format_.table, dtype=torch.float32).sort(stable=True)
    num_columns = rows.shape[1]
    groups = pad(rows.float(), (0, -num_columns % format_.group)).unflatten(1, (-1, format_.group))
    scales = groups.abs().amax(2) / numbers.abs().max()
    places = groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    nearest = torch.bucketize(places, (numbers[1:] + numbers[:-1]) / 2)
    return QuantizedRows(codes.to(torch.uint8)[nearest].flatten(1)[:, :num_columns].contiguous(), scales)


def quantized_in_layers(format_: QuantFormat, name: str) -> LinearScheme:
    """The scheme of a layer of checkpoints that are quantized at load. Embedding and output head stay dense, as in
    TGI."""
    return Dense() if name in ("embedding", "head") else AtLoad(format_)


def stored_everywhere(_name: str) -> LinearScheme:
    """The `SchemeOf` of every checkpoint."""
    return Stored()
