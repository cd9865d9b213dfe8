"""Linear layers, and the schemes by which their weights are stored, packed and applied.

INVARIANT: only a scheme knows how a weight is represented. Layers and models name a linear layer, describe its dense
shape, and call it; they are the same for every checkpoint format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock_server.device.ops import Lookup, Ops, PackedLinear, Weight, whole
from penstock_server.weights.loader import Loader, Parameter


class LinearWeights(Protocol):
    """What a scheme found in the checkpoint for one layer, or for several layers fused along their outputs."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the layer's inputs and outputs."""
        ...

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """The weight [out_features, in_features] and the bias, for layers that compute other matrices from them."""
        ...

    def reorder(self, rows: Tensor) -> LinearWeights:
        """The layer whose output i is output `rows[i]` of this one. rows: [out_features] int64."""
        ...

    def without_bias(self) -> LinearWeights: ...

    def pack(self, ops: Ops, *, gated: bool = False) -> PackedLinear:
        """gated: the outputs are gate and up, concatenated, and the layer returns silu(gate) * up."""
        ...

    def pack_tied(self, ops: Ops) -> tuple[PackedLinear, Lookup]:
        """The output head and the embedding whose table is the same weight, which is held once if possible."""
        ...

    def lookup(self, ops: Ops) -> Lookup:
        """The weight as an embedding table."""
        ...


Arrange = Callable[[Sequence[tuple[Tensor, Tensor | None]]], "Iterator[DenseWeights]"]
"""This rank's part of weight and bias of each parameter that holds many layers → these layers, fused along their
outputs. Not needed if the weights are stored as [layers, out_features, in_features], and biases accordingly."""


class LinearScheme(Protocol):
    """How the weights of linear layers are represented: in the checkpoint, in memory, in the multiplication."""

    def parameters(self, name: str, weight: Parameter, bias: Parameter | None) -> dict[str, Parameter]:
        """The tensors that a checkpoint stores for a layer. weight, bias: their full shape and this rank's part of it
        if they were stored dense."""
        ...

    def load(self, loader: Loader, *names: str) -> LinearWeights:
        """This rank's part of a layer; of several layers with the same input, fused along their outputs."""
        ...

    def load_each(self, loader: Loader, names: Sequence[str], arrange: Arrange) -> Iterator[LinearWeights]:
        """Like `load`, of parameters that hold many layers: yields one layer after the other."""
        ...


SchemeOf = Callable[[str], LinearScheme]
"""The scheme of the linear layer with this name. A checkpoint may store its layers by different schemes."""


@dataclass(frozen=True, slots=True)
class OrderedLinear:
    """A layer whose columns are in another order than the features of its input. Implements `PackedLinear`."""

    linear: PackedLinear
    order: Tensor  # [in_features] int64

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x.index_select(1, self.order))


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Implements `LinearWeights`. A `LazyWeight` is read while it is packed, piece by piece where the operators can."""

    weight: Weight
    bias: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dense(self) -> tuple[Tensor, Tensor | None]:
        return whole(self.weight), self.bias

    def reorder(self, rows: Tensor) -> DenseWeights:
        return DenseWeights(whole(self.weight)[rows], None if self.bias is None else self.bias[rows])

    def without_bias(self) -> DenseWeights:
        return DenseWeights(self.weight)

    def pack(self, ops: Ops, *, gated: bool = False) -> PackedLinear:
        return (ops.pack_gate_up if gated else ops.pack_linear)(self.weight, self.bias)

    def pack_tied(self, ops: Ops) -> tuple[PackedLinear, Lookup]:
        return ops.pack_tied(self.weight)

    def lookup(self, ops: Ops) -> Lookup:
        return partial(embedding, weight=whole(self.weight))


class Dense:
    """Weights in a floating-point type, as `name.weight` and `name.bias`. Implements `LinearScheme`."""

    def parameters(self, name: str, weight: Parameter, bias: Parameter | None) -> dict[str, Parameter]:
        table = {f"{name}.weight": weight}
        return table if bias is None else {**table, f"{name}.bias": bias}

    def load(self, loader: Loader, *names: str) -> LinearWeights:
        return load_dense(loader, *names)

    def load_each(self, loader: Loader, names: Sequence[str], arrange: Arrange) -> Iterator[LinearWeights]:
        return load_each_dense(loader, names, arrange)


def load_dense(loader: Loader, *names: str) -> DenseWeights:
    """`LinearScheme.load` of dense weights. All names have a bias or none has."""
    weight = loader.unread(*(f"{name}.weight" for name in names))
    return DenseWeights(weight, loader.read_if_there(*(f"{name}.bias" for name in names)))


def load_each_dense(loader: Loader, names: Sequence[str], arrange: Arrange) -> Iterator[DenseWeights]:
    """`LinearScheme.load_each` of dense weights."""
    return arrange([(loader.read(f"{name}.weight"), loader.read_if_there(f"{name}.bias")) for name in names])


def dense_everywhere(_name: str) -> LinearScheme:
    """The `SchemeOf` of checkpoints whose weights are dequantized at load, or not quantized."""
    return Dense()
