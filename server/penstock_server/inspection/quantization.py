"""The quantized weights of a model, from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from penstock_server.device.quantized import Kept, QuantFormat, QuantizedMatrix, stays_quantized
from penstock_server.errors import ConfigError
from penstock_server.inspection.files import ModelFiles, StoredTensor
from penstock_server.weights.folder import find_weights
from penstock_server.weights.format import quantization_config
from penstock_server.weights.loader import Parameter
from penstock_server.weights.location import Locator
from penstock_server.weights.quantization.method import has_four_bit_inputs, quantized_weights
from penstock_server.weights.quantization.stored import Affine, NotDownloadedError
from penstock_server.weights.safetensors_file import LOADABLE, SafetensorsCheckpoint


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model's tensors as the loader sees them, and which of them are quantized."""

    method: str
    tensors: Mapping[str, StoredTensor]
    formats: Mapping[str, QuantFormat | None]  # by quantized weight; None: it is dequantized at load
    order_of: Callable[[str], torch.Tensor | None]  # order of a weight's columns, as in `QuantizedMatrix`

    def dequantized(self) -> Quantized:
        """The same with all weights dequantized at load."""
        return replace(self, formats=dict.fromkeys(self.formats))

    def saved_bytes(self, table: Mapping[str, Parameter], locator: Locator, dtype: torch.dtype, kept: Kept) -> int:
        """Bytes of this rank's weights that stay quantized, less than those of the dense weights."""
        layers: dict[str, list[str]] = {}
        for name, parameter in table.items():
            layers.setdefault(parameter.layer or name, []).append(name)
        return sum(
            self._saved_in({name: table[name] for name in names}, locator, dtype, kept) for names in layers.values()
        )

    def _saved_in(self, layer: Mapping[str, Parameter], locator: Locator, dtype: torch.dtype, kept: Kept) -> int:
        """Bytes saved in one layer, or in the same layer of all experts."""
        saved, weights = 0, []
        for name, parameter in layer.items():
            stored = [tensor for tensor, _ in locator.locate(name).matrices(parameter.shape, parameter.part)]
            formats = [format_ for tensor in stored if (format_ := self.formats.get(tensor)) is not None]
            if parameter.is_dense or not stored or len(formats) < len(stored):
                return 0
            weights.append(list(zip(formats, map(self.order_of, stored), strict=True)))
            *rows, columns = parameter.local_shape
            shape = math.prod(rows) // len(stored), columns
            num_bytes = sum(QuantizedMatrix(shape, format_, lambda: iter(())).num_bytes for format_ in formats)
            saved += math.prod(parameter.local_shape) * parameter.dtype_in(dtype).itemsize - num_bytes
        is_reordered = next(iter(layer.values())).is_reordered
        stays = all(stays_quantized(each, kept, is_reordered=is_reordered) for each in zip(*weights, strict=True))
        return saved if stays else 0

    def describe(self) -> str:
        """For people: method, bits, and what happens to the weights."""
        kept = {name: format_ for name, format_ in self.formats.items() if format_ is not None}
        bits = " and ".join(map(str, sorted({format_.bits for format_ in kept.values()})))
        parts = []
        if kept:
            shapes = [self.tensors[name].shape for name in kept]
            matrices = [
                QuantizedMatrix((math.prod(rows), columns), format_, lambda: iter(()))
                for (*rows, columns), format_ in zip(shapes, kept.values(), strict=True)
            ]
            per_weight = 8 * sum(matrix.num_bytes for matrix in matrices) / sum(map(math.prod, shapes))
            parts.append(f"{len(kept)} weights stay in {bits} bits, {per_weight:.2f} each with their scales")
        if len(kept) < len(self.formats):
            parts.append(f"{len(self.formats) - len(kept)} are dequantized at load")
        return f"{self.method}: {', '.join(parts)}"


def quantized(files: ModelFiles, folder: Path) -> Quantized | None:
    """None if the model is not quantized. Raises ConfigError if its quantization is not supported."""
    if files.tensors is None:
        return None
    if files.kind == "gguf":
        from gguf.constants import GGMLQuantizationType

        from penstock_server.weights.gguf.block import FORMATS

        types = {name: tensor.dtype for name, tensor in files.tensors.items()}
        formats = {
            name: FORMATS.get(GGMLQuantizationType[dtype]) for name, dtype in types.items() if dtype not in LOADABLE
        }
        return Quantized("gguf", files.tensors, formats, lambda _: None) if formats else None
    options = quantization_config(folder)
    if options is None or files.kind != "safetensors":
        return None
    try:
        checkpoint = SafetensorsCheckpoint(find_weights(folder).paths)
    except ConfigError:
        checkpoint = None  # not downloaded

    def read(name: str, rows: range | None = None) -> torch.Tensor:
        if checkpoint is None:
            raise NotDownloadedError(f"the shape of {name} is only known after the download")
        return checkpoint.raw(name, rows)

    method, weights = quantized_weights(
        options, files.tensors, read, checkpoint.metadata if checkpoint is not None else lambda: files.metadata
    )
    assert isinstance(options, dict)
    if has_four_bit_inputs(options):
        files.notes.append("the checkpoint is made for inputs of 4 bits; only its weights are quantized here")
    parts = {tensor for weight in weights.values() for tensor in weight.tensors}
    tensors = {name: tensor for name, tensor in files.tensors.items() if name not in parts}
    tensors |= {name: StoredTensor(method, weight.shape) for name, weight in weights.items()}
    formats = {name: weight.format if isinstance(weight, Affine) else None for name, weight in weights.items()}

    def order_of(name: str) -> torch.Tensor | None:
        """In order, if the model is not downloaded: layers with the same input have the same order."""
        weight = weights[name]
        return weight.order(read) if checkpoint is not None and isinstance(weight, Affine) else None

    return Quantized(method, tensors, formats, cache(order_of))
