"""Reads GGUF files as a checkpoint: dequantized, with the row order and norm offsets of Hugging Face's models."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from penstock_server.device.quantized import QuantizedMatrix
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.file import WeightFile
from penstock_server.weights.finite import check_finite
from penstock_server.weights.gguf.config import BUILDERS, unsupported
from penstock_server.weights.gguf.decoder import head_dim
from penstock_server.weights.gguf.derived import (
    CONVOLUTIONS,
    Constant,
    LatentExpansion,
    derived_tensors,
    stored_tensors,
)
from penstock_server.weights.gguf.header import TensorInfo, read_header
from penstock_server.weights.gguf.matrix import MatrixReader, check_tensor, dequantized_types
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.name import GgufLocator
from penstock_server.weights.location import Locator

logger = logging.getLogger(__name__)

# For these architectures llama.cpp's converter interleaves the two halves of each head's q and k rows, because its rope
# rotates neighbouring pairs.
INTERLEAVED = (
    "arcee",
    "baichuan",
    "granite",
    "granitehybrid",
    "granitemoe",
    "internlm2",
    "llama",
    "mistral3",
    "olmo",
    "smollm3",
)
INTERLEAVED_ROWS = (".attn_q.", ".attn_k.")
# For these architectures the file stores norm weights plus one.
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
# Norms of layers that keep a state are stored as they are.
STATE_NORM = ".ssm_norm.weight"
# Rates of decay are stored as what multiplies the time, below 0; models have the logarithm of its size.
RATES = ".ssm_a"


class GgufCheckpoint:
    """The tensors of one GGUF model, by their GGUF names. Implements `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        header = read_header(path, with_vocabulary=False)
        metadata = Metadata(header, path)
        if metadata.architecture not in BUILDERS:
            raise unsupported(metadata)
        self.metadata = metadata
        self.head_dim = head_dim(metadata) if metadata.architecture in INTERLEAVED else 0
        # Errors name the user's files, not the links of `gguf_folder` to them.
        self.files = tuple(WeightFile(part.resolve()) for part in header.paths)
        for info in header.tensors.values():
            check_tensor(info, self.files[info.file])
        if dequantized := dequantized_types(header.tensors.values()):
            logger.info("weights of type %s are dequantized: no kernel reads them", " and ".join(dequantized))
        self.matrices = MatrixReader(self.files)
        self.derived = derived_tensors(metadata)
        self.tensors: dict[str, TensorInfo] = stored_tensors(metadata)
        self.tensors |= {name: tensor.info for name, tensor in self.derived.items()}

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def locator(self) -> Locator:
        """Locator of the parameters in the files."""
        return GgufLocator({name: info.shape for name, info in self.tensors.items()}, self.metadata)

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        info, derived = self.tensors[name], self.derived.get(name)
        if isinstance(derived, Constant):
            out.fill_(derived.value)
        elif isinstance(derived, LatentExpansion):
            self._read_latent_expansion(derived, part, out)
        elif len(info.shape) == 1:
            vector = self._vector(info)
            out.copy_(vector if part is None else part.of(vector))
        elif info.name.endswith(CONVOLUTIONS):
            assert part is None or part.dim == 0, "a convolution is split by channels"
            self.matrices.read(replace(info, shape=info.shape[::2]), part, out.squeeze(1))
        else:
            self.matrices.read(info, part, out, self.head_dim if self._is_interleaved(name) else 0)
        if name.endswith(RATES):
            out.neg_().log_()
        check_finite(out, out, name, self.files[info.file].path)

    def has_independent_rows(self, name: str) -> bool:
        return name not in self.derived and not self._is_interleaved(name)

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        if name in self.derived:
            return None
        return self.matrices.quantized(self.tensors[name], part, self.head_dim if self._is_interleaved(name) else 0)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _vector(self, info: TensorInfo) -> Tensor:
        vector = self.matrices.vector(info)
        if self._is_interleaved(info.name):
            return vector.view(-1, self.head_dim // 2, 2).transpose(1, 2).reshape(info.shape)
        if self.metadata.architecture in NORMS_PLUS_ONE and info.name.endswith("norm.weight"):
            return vector if info.name.endswith(STATE_NORM) else vector - 1
        return vector

    def _read_latent_expansion(self, tensor: LatentExpansion, part: Part | None, out: Tensor) -> None:
        """A part must consist of whole heads."""
        (_, latent, key), (_, value, _) = tensor.keys.shape, tensor.values.shape
        rows = range(tensor.info.shape[0])
        if part is not None:
            assert part.dim == 0, "a latent expansion is split by heads"
            rows = part.range
        keys = replace(tensor.keys, shape=(latent, key))
        values = replace(tensor.values, shape=(value, latent))
        for place, head in enumerate(range(rows.start // (key + value), rows.stop // (key + value))):
            head_rows = out[place * (key + value) : (place + 1) * (key + value)]
            self.matrices.read(keys, None, head_rows[:key].t(), first_row=head * latent)
            self.matrices.read(values, None, head_rows[key:], first_row=head * value)

    def _is_interleaved(self, name: str) -> bool:
        return self.metadata.architecture in INTERLEAVED and any(rows in name for rows in INTERLEAVED_ROWS)
