"""The end of a model whose outputs are pooled: from pooled outputs to vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, tanh

from penstock_server.errors import ConfigError
from penstock_server.layers.norm import norm_parameters
from penstock_server.models.spec import ClassifierSpec, ModelSpec
from penstock_server.protocol.config import Dense, Pooling
from penstock_server.weights.loader import Loader, Parameter, mismatches
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from penstock_server.weights.torch_file import read_state_dict

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": tanh,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Pooler:
    """Computes in float32: a step has few rows of it."""

    pooling: Pooling
    num_dimensions: int
    dense: tuple[DenseLayer, ...]
    classify: Classifier | None

    @classmethod
    def load(cls, spec: ModelSpec, loader: Loader) -> Pooler | None:
        """None: the model generates tokens."""
        if spec.pooling is None:
            return None
        if spec.classifier is None:
            layers = spec.pooling.dense
            num_dimensions = layers[-1].out_features if layers else spec.hidden_size
            dense = tuple(DenseLayer.load(layer, loader.device) for layer in layers)
            return cls(spec.pooling, num_dimensions, dense, None)
        return cls(spec.pooling, 1, (), Classifier.load(spec.classifier, loader))

    def __call__(self, pooled: Tensor) -> Tensor:
        """pooled [rows, hidden] float32 → vectors [rows, dimensions] float32."""
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled if self.classify is None else self.classify(pooled)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A `Dense` module, whose weights are not in the model's checkpoint."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]
    activate: Callable[[Tensor], Tensor]

    @classmethod
    def load(cls, spec: Dense, device: torch.device) -> DenseLayer:
        """Raises ConfigError if the file does not hold what the configuration says."""
        stored = _stored(spec.weights)
        table = _linear("linear", spec.out_features, spec.in_features, bias=spec.bias)
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        problems = mismatches(shapes, {name: parameter.shape for name, parameter in table.items()}, ())
        if problems:
            raise ConfigError(f"{spec.weights.parent}: {problems[0]}")
        found = {name: tensor.to(device, torch.float32) for name, tensor in stored.items()}
        return cls(found["linear.weight"], found.get("linear.bias"), _ACTIVATIONS[spec.activation])

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] float32 → [rows, out_features] float32"""
        return self.activate(linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Classifier:
    """The layers of a `ClassifierSpec`; weights are None where it has none."""

    spec: ClassifierSpec
    dense: tuple[Tensor | None, Tensor | None]
    norm: tuple[Tensor | None, Tensor | None]
    out: tuple[Tensor, Tensor | None]

    @staticmethod
    def parameters(spec: ClassifierSpec, hidden_size: int) -> dict[str, Parameter]:
        """Every rank holds all of them."""
        table = _linear("classifier.out", 1, hidden_size, bias=spec.bias)
        if spec.dense_activation is not None:
            if spec.dense_activation not in _ACTIVATIONS:
                raise ConfigError(
                    f"config.json: a classifier with activation {spec.dense_activation!r} is not supported"
                )
            table |= _linear("classifier.dense", hidden_size, hidden_size, bias=spec.dense_bias)
        if spec.norm is not None:
            table |= norm_parameters("classifier.norm", spec.norm, (hidden_size,))
        return table

    @classmethod
    def load(cls, spec: ClassifierSpec, loader: Loader) -> Classifier:
        def read(name: str, is_there: bool = True) -> Tensor | None:
            return loader.read(name).float() if is_there else None

        has_dense, norm = spec.dense_activation is not None, spec.norm
        return cls(
            spec,
            (read("classifier.dense.weight", has_dense), read("classifier.dense.bias", has_dense and spec.dense_bias)),
            (
                read("classifier.norm.weight", norm is not None and norm.has_weight),
                read("classifier.norm.bias", norm is not None and norm.bias),
            ),
            (loader.read("classifier.out.weight").float(), read("classifier.out.bias", spec.bias)),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → logits [rows, 1]"""
        weight, bias = self.dense
        if self.spec.dense_activation is not None and weight is not None:
            x = _ACTIVATIONS[self.spec.dense_activation](linear(x, weight, bias))
        if self.spec.norm is not None:
            x = layer_norm(x, x.shape[-1:], *self.norm, eps=self.spec.norm.eps)
        return linear(x, *self.out)


def _stored(path: Path) -> dict[str, Tensor]:
    """A module's tensors. A pickle is small here, so it is not converted first."""
    if path.suffix == ".bin":
        return read_state_dict(path)
    checkpoint = SafetensorsCheckpoint((path,))
    tensors = {name: torch.empty(checkpoint.shape(name)) for name in checkpoint.names()}
    for name, out in tensors.items():
        checkpoint.read(name, None, out)
    checkpoint.close()
    return tensors


def _linear(name: str, out_features: int, in_features: int, *, bias: bool) -> dict[str, Parameter]:
    table = {f"{name}.weight": Parameter((out_features, in_features))}
    return {**table, f"{name}.bias": Parameter((out_features,))} if bias else table
