"""Reads GGUF files as a checkpoint: tensors by their Hugging Face names, dequantized, in Hugging Face's row order."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.finite import check_finite
from penstock_server.weights.gguf_config import Metadata
from penstock_server.weights.gguf_header import TensorInfo, read_header
from penstock_server.weights.mapping import MappedFile

# GGUF's name, {i} for the layer → Hugging Face's. The same for every architecture of the Llama family.
LLAMA_FAMILY_NAMES = {
    "token_embd": "model.embed_tokens",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}
NAMES = {"llama": LLAMA_FAMILY_NAMES, "qwen2": LLAMA_FAMILY_NAMES}
# llama.cpp's converter interleaves the halves of each head's q and k rows for its own rope.
INTERLEAVED = {"llama": ("attn_q", "attn_k")}
# The table of Llama 3's rope scaling: it is in the configuration.
IGNORED = ("rope_freqs.weight",)

# PERF: dequantizing makes several float32 arrays of its input. Pieces of so many weights stay in the L2 cache, keep
# the peak of memory at the weights themselves, and are too small for torch to start threads for copying them.
PIECE_WEIGHTS = 1 << 15


class GgufCheckpoint:
    """The tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        metadata = Metadata(header, path)
        names = NAMES.get(metadata.architecture)
        if names is None:
            raise metadata.refuse(
                f"GGUF architecture {metadata.architecture!r} is not supported; supported: {', '.join(NAMES)}"
            )
        self.head_dim = int(
            metadata.model(
                "attention.key_length",
                metadata.require_model("embedding_length") // metadata.require_model("attention.head_count"),
            )
        )
        self.file = MappedFile(path)
        self.interleaved = INTERLEAVED.get(metadata.architecture, ())
        self.tensors: dict[str, TensorInfo] = {}
        for info in header.tensors.values():
            if info.name not in IGNORED:
                _check(info, self.file)
                # A name without a translation stays as it is; the loader will refuse it by that name.
                self.tensors[_translate(info.name, names)] = info

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        info = self.tensors[name]
        if len(info.shape) == 1:
            self._read_vector(info, part, out)
        else:
            self._read_matrix(info, part, out)
        check_finite(out, out, name, self.file.path)
        rows, _ = _matrix(info.shape)
        self.file.forget(info.offset, info.offset + rows * _row_bytes(info))

    def close(self) -> None:
        self.file.close()

    def _read_vector(self, info: TensorInfo, part: Part | None, out: Tensor) -> None:
        vector = self._rows(info, 0, 1).view(info.shape)
        if self._is_interleaved(info):
            vector = vector.view(-1, self.head_dim // 2, 2).transpose(1, 2).reshape(info.shape)
        out.copy_(vector if part is None else part.of(vector))

    def _read_matrix(self, info: TensorInfo, part: Part | None, out: Tensor) -> None:
        assert len(info.shape) == 2
        rows, columns = range(info.shape[0]), slice(None)
        if part is not None and part.dim == 0:
            rows = part.range
        elif part is not None:
            columns = slice(part.range.start, part.range.stop)
        # An even number of rows, so that no piece cuts a pair of interleaved rows.
        step = max(2, PIECE_WEIGHTS // info.shape[1] // 2 * 2)
        interleaved = self._is_interleaved(info)
        # Interleaved parts are whole heads; each is put in order by itself.
        block = self.head_dim if interleaved else len(rows)
        for start in range(rows.start, rows.stop, max(1, block)):
            target = out[start - rows.start : start - rows.start + block]
            for first in range(0, block, step):
                piece = self._rows(info, start + first, min(step, block - first))[:, columns]
                if interleaved:
                    pairs = piece.view(-1, 2, piece.shape[1]).transpose(0, 1)  # [half, pair, column]
                    halves = target.view(2, block // 2, piece.shape[1])
                    halves[:, first // 2 : first // 2 + pairs.shape[1]].copy_(pairs)
                else:
                    target[first : first + piece.shape[0]].copy_(piece)

    def _rows(self, info: TensorInfo, first: int, count: int) -> Tensor:
        """float32 [count, columns]"""
        row_bytes = _row_bytes(info)
        start = info.offset + first * row_bytes
        raw = np.frombuffer(self.file.data, dtype=np.uint8, count=count * row_bytes, offset=start)
        return torch.from_numpy(dequantize(raw.reshape(count, row_bytes), GGMLQuantizationType(info.type_number)))

    def _is_interleaved(self, info: TensorInfo) -> bool:
        return any(f".{stem}." in info.name for stem in self.interleaved)


def _translate(name: str, names: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", stem)
    if layer is None:
        return f"{names[stem]}.{suffix}" if stem in names else name
    pattern = stem.replace(layer[0], "blk.{i}.", 1)
    return f"{names[pattern]}.{suffix}".replace("{i}", layer[1]) if pattern in names else name


def _check(info: TensorInfo, file: MappedFile) -> None:
    try:
        type_ = GGMLQuantizationType(info.type_number)
    except ValueError as error:
        raise ConfigError(f"{file.path}: tensor {info.name} is of unknown type {info.type_number}") from error
    block_weights, _ = GGML_QUANT_SIZES[type_]
    rows, columns = _matrix(info.shape)
    if not rows * columns or columns % block_weights:
        raise ConfigError(
            f"{file.path} is damaged: tensor {info.name} has shape {list(info.shape)} in type {type_.name}"
        )
    try:
        dequantize(np.zeros((1, _row_bytes(info)), dtype=np.uint8), type_)
    except NotImplementedError as error:
        raise ConfigError(
            f"{file.path}: tensor {info.name} is quantized as {type_.name}, which is not supported"
        ) from error
    stop = info.offset + rows * _row_bytes(info)
    if stop > file.size:
        raise ConfigError(f"{file.path} is truncated: tensor {info.name} ends at byte {stop}, the file at {file.size}")


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a vector is one row."""
    columns = shape[-1] if shape else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, columns


def _row_bytes(info: TensorInfo) -> int:
    block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_number)]
    return _matrix(info.shape)[1] // block_weights * block_bytes
