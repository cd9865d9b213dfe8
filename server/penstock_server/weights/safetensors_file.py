"""Reads safetensors files by mapping them. Format: https://huggingface.co/docs/safetensors/index#format.

Own code, not the library's, because it lets go of pages while it loads, and names what is wrong with a damaged file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.mapping import MappedFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LOADABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    file: MappedFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # from the start of the file
    stop: int


class SafetensorsCheckpoint:
    """The tensors of one or several files as one set of names."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.entries: dict[str, Entry] = {}
        self.files: list[MappedFile] = []
        for path in paths:
            for name, entry in self._entries(path).items():
                if name in self.entries:
                    raise ConfigError(
                        f"tensor {name} is in two files: {self.entries[name].file.path.name} and {path.name}"
                    )
                self.entries[name] = entry

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        entry = self.entries[name]
        if entry.dtype not in LOADABLE:
            raise ConfigError(
                f"{entry.file.path}: tensor {name} is of type {entry.dtype}, which cannot be loaded as a weight"
            )
        if entry.start == entry.stop:
            return
        tensor = torch.frombuffer(entry.file.data, dtype=entry.dtype, count=math.prod(entry.shape), offset=entry.start)
        tensor = tensor.view(entry.shape)
        out.copy_(tensor if part is None else part.of(tensor))
        entry.file.forget(entry.start, entry.stop)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _entries(self, path: Path) -> dict[str, Entry]:
        size = path.stat().st_size
        if size <= LENGTH_BYTES:
            raise ConfigError(f"{path} is truncated: it has {size} bytes")
        file = MappedFile(path)
        self.files.append(file)
        header_stop = LENGTH_BYTES + int.from_bytes(file.data[:LENGTH_BYTES], "little")
        if header_stop > size:
            raise ConfigError(
                f"{path} is truncated or no safetensors file: its header ends at {header_stop}, the file at {size}"
            )
        try:
            header = json.loads(file.data[LENGTH_BYTES:header_stop], object_pairs_hook=_unique)
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise ConfigError(f"{path} is damaged: its header is not a JSON object")
        header.pop("__metadata__", None)
        return {name: _entry(file, name, value, header_stop) for name, value in header.items()}


def _entry(file: MappedFile, name: str, value: dict[str, Any], data_start: int) -> Entry:
    try:
        dtype_name, shape, (begin, end) = str(value["dtype"]), tuple(map(int, value["shape"])), value["data_offsets"]
        start, stop = data_start + int(begin), data_start + int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file.path} is damaged: its header describes tensor {name} wrongly") from error
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise ConfigError(f"{file.path}: tensor {name} is of type {dtype_name}, which is not supported")
    if stop > file.size:
        raise ConfigError(f"{file.path} is truncated: tensor {name} ends at byte {stop}, the file at {file.size}")
    if start < data_start or stop - start != math.prod(shape) * dtype.itemsize:
        raise ConfigError(
            f"{file.path} is damaged: tensor {name} of shape {list(shape)} does not fit its place in the file"
        )
    return Entry(file, dtype, shape, start, stop)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return values
