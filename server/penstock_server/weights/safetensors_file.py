"""Reads safetensors files piece by piece.

The library is not used, because here at most one piece of a file is in memory, and errors name the fault of a damaged
file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock_server.device.quantized import QuantizedMatrix
from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part, split_leading
from penstock_server.weights.file import WeightFile
from penstock_server.weights.finite import check_finite
from penstock_server.weights.memory import PIECE_BYTES, Scratch
from penstock_server.weights.safetensors_header import Place, read_header, read_metadata
from penstock_server.weights.wrapper import note_on, unwrapped

LOADABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED = LOADABLE | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
AHEAD_BYTES = 4 * PIECE_BYTES  # read-ahead; tensors are read roughly in file order


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor and its file."""

    file: WeightFile
    place: Place


class SafetensorsCheckpoint:
    """The tensors of one or several files, by their names without those of wrappers. weight_map: tensor → file name,
    from the index. Implements `Checkpoint`."""

    def __init__(self, paths: tuple[Path, ...], weight_map: Mapping[str, str] | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.files: list[WeightFile] = []
        self._scratch = Scratch()
        for path in paths:
            header = read_header(path)
            file = WeightFile(path)
            self.files.append(file)
            for name, place in header.items():
                if name in self.entries:
                    raise ConfigError(
                        f"tensor {name} is in two files: {self.entries[name].file.path.name} and {path.name}"
                    )
                self.entries[name] = Entry(file, place)
        self.wrapper_note = note_on(self.entries)
        for name, file_name in (weight_map or {}).items():
            entry = self.entries.get(name)
            if entry is None or entry.file.path.name != file_name:
                raise ConfigError(
                    f"the index of {paths[0].parent} says that tensor {name} is in {file_name}, which does not hold it"
                )
        self.entries = {plain: self.entries[name] for name, plain in unwrapped(self.entries).items()}

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].place.shape

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        file, place = self.entries[name].file, self.entries[name].place
        if place.dtype not in LOADABLE:
            raise ConfigError(
                f"{file.path}: tensor {name} is of type {place.dtype}, which cannot be loaded as a weight; "
                f"{', '.join(LOADABLE)} can"
            )
        shape = (part and part.view) or place.shape or (1,)
        self._fill(name, place.start, shape, part, out.view(out.shape or (1,)))

    @property
    def headers(self) -> Mapping[str, Place]:
        """Type and shape of every tensor."""
        return {name: entry.place for name, entry in self.entries.items()}

    def metadata(self) -> dict[str, str]:
        """The metadata of all files. Reads their headers again."""
        return {key: value for file in self.files for key, value in read_metadata(file.path).items()}

    def raw(self, name: str, rows: range | None = None) -> Tensor:
        """A tensor in its stored type, or these rows of its first dimension."""
        file, place = self.entries[name].file, self.entries[name].place
        shape = place.shape if rows is None else (len(rows), *place.shape[1:])
        tensor = torch.empty(shape, dtype=STORED[place.dtype])
        start = 0 if rows is None else rows.start * math.prod(shape[1:]) * tensor.itemsize
        file.read_into(tensor.view(-1).view(torch.uint8).numpy().data, place.start + start)
        return tensor

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        return self.entries[name].file.path

    def _fill(self, name: str, start: int, shape: tuple[int, ...], part: Part | None, out: Tensor) -> None:
        """Fills `out` with a tensor of this shape that starts at byte `start`, or with a part of it."""
        file, dtype = self.entries[name].file, LOADABLE[self.entries[name].place.dtype]
        rows, columns = split_leading(part, shape[0])
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if len(shape) > 2:
            for place, row in enumerate(rows):
                self._fill(name, start + row * row_bytes, shape[1:], columns, out[place])
            return
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        for first in range(0, len(rows), step):
            filled = out[first : first + step]
            begin = start + (rows.start + first) * row_bytes
            is_direct = columns is None and filled.dtype == dtype and filled.is_contiguous()
            piece = filled if is_direct else self._scratch.tensor((len(filled), *shape[1:]), dtype)
            file.expect(begin, AHEAD_BYTES)
            file.read_into(piece.view(-1).view(torch.uint8).numpy().data, begin)
            if columns is not None:
                piece = piece.narrow(1, columns.range.start, len(columns.range))
            if not is_direct:
                filled.copy_(piece)
            check_finite(filled, piece, name, file.path)

    def has_independent_rows(self, name: str) -> bool:
        return True

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        return None

    def close(self) -> None:
        for file in self.files:
            file.close()
