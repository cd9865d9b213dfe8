"""The quantized weights of a model, from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock_server.errors import ConfigError
from penstock_server.inspection.files import ModelFiles, StoredTensor
from penstock_server.kernels.ops import Ops
from penstock_server.kernels.quantized import QuantFormat, QuantizedMatrix
from penstock_server.weights.folder import find_weights
from penstock_server.weights.format import quantization_config
from penstock_server.weights.loader import Parameter
from penstock_server.weights.location import Locator
from penstock_server.weights.quantization.method import method_of
from penstock_server.weights.quantization.stored import Affine
from penstock_server.weights.safetensors_file import LOADABLE, SafetensorsCheckpoint


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model's tensors as the loader sees them, and which of them are quantized."""

    method: str
    tensors: Mapping[str, StoredTensor]
    formats: Mapping[str, QuantFormat | None]  # of the quantized weights; None: it is dequantized at load

    def kept_by(self, ops: Ops) -> Quantized:
        formats = self.formats.items()
        return replace(
            self, formats={name: each if each is None or ops.keeps(each) else None for name, each in formats}
        )

    def saved_bytes(self, table: Mapping[str, Parameter], locator: Locator, dtype: torch.dtype) -> int:
        """Bytes of this rank's weights that stay quantized, less than those of the dense weights."""
        saved = 0
        for name, parameter in table.items():
            stored = locator.locate(name).matrices(parameter.shape, parameter.part)
            formats = [format_ for tensor, _ in stored if (format_ := self.formats.get(tensor)) is not None]
            if parameter.is_dense or not stored or len(formats) < len(stored):
                continue
            *rows, columns = parameter.local_shape
            shape = math.prod(rows) // len(stored), columns
            kept = sum(QuantizedMatrix(shape, format_, lambda: iter(())).num_bytes for format_ in formats)
            saved += math.prod(parameter.local_shape) * parameter.dtype_in(dtype).itemsize - kept
        return saved

    def describe(self) -> str:
        """For people: method, bits, and what happens to the weights."""
        kept = [format_ for format_ in self.formats.values() if format_ is not None]
        bits = " and ".join(map(str, sorted({format_.bits for format_ in kept})))
        parts = [f"{len(kept)} weights stay in {bits} bits"] if kept else []
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
        return Quantized("gguf", files.tensors, formats) if formats else None
    options = quantization_config(folder)
    if options is None or files.kind != "safetensors":
        return None
    try:
        checkpoint = SafetensorsCheckpoint(find_weights(folder).paths)
    except ConfigError:
        checkpoint = None  # not downloaded

    def read(name: str, rows: range | None = None) -> torch.Tensor:
        if checkpoint is None:
            raise ConfigError(f"the shape of {name} is only known after the download")
        return checkpoint.raw(name, rows)

    method = method_of(options, read)
    weights = method.find(files.tensors)
    parts = {tensor for weight in weights.values() for tensor in weight.tensors}
    tensors = {name: tensor for name, tensor in files.tensors.items() if name not in parts}
    tensors |= {name: StoredTensor(method.name, weight.shape) for name, weight in weights.items()}
    formats = {name: weight.format if isinstance(weight, Affine) else None for name, weight in weights.items()}
    return Quantized(method.name, tensors, formats)
