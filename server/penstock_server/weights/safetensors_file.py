"""Reads safetensors files by mapping them.

Own code, not the library's, because it lets go of pages while it loads, and names what is wrong with a damaged file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.finite import check_finite
from penstock_server.weights.mapping import MappedFile
from penstock_server.weights.safetensors_header import Place, read_header

LOADABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# PERF: of a tensor so many bytes are resident at a time beside what is made of them, and they are still in the
# cache when they are checked; smaller pieces leave threads idle.
PIECE_BYTES = 8 << 20
AHEAD_BYTES = 4 * PIECE_BYTES  # tensors are read in about the order in which they lie in their file


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor and the file that it is in."""

    file: MappedFile
    place: Place


class SafetensorsCheckpoint:
    """The tensors of one or several files as one set of names; `weight_map` is what their index says."""

    def __init__(self, paths: tuple[Path, ...], weight_map: Mapping[str, str] | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.files: list[MappedFile] = []
        for path in paths:
            header = read_header(path)
            file = MappedFile(path)
            self.files.append(file)
            for name, place in header.items():
                if name in self.entries:
                    raise ConfigError(
                        f"tensor {name} is in two files: {self.entries[name].file.path.name} and {path.name}"
                    )
                self.entries[name] = Entry(file, place)
        for name, file_name in (weight_map or {}).items():
            entry = self.entries.get(name)
            if entry is None or entry.file.path.name != file_name:
                raise ConfigError(
                    f"the index of {paths[0].parent} says that tensor {name} is in {file_name}, which does not hold it"
                )

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def own_names(self) -> None:
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].place.shape

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        file, place = self.entries[name].file, self.entries[name].place
        if place.dtype not in LOADABLE:
            raise ConfigError(
                f"{file.path}: tensor {name} is of type {place.dtype}, which cannot be loaded as a weight; "
                f"{', '.join(LOADABLE)} can"
            )
        if place.start == place.stop:
            return
        tensor = torch.frombuffer(
            file.data, dtype=LOADABLE[place.dtype], count=math.prod(place.shape), offset=place.start
        ).view(place.shape or (1,))
        first_row = part.range.start if part is not None and part.dim == 0 else 0
        wanted, target = tensor if part is None else part.of(tensor), out.view(out.shape or (1,))
        row_bytes = tensor[0].nbytes
        step = max(1, PIECE_BYTES // row_bytes)
        for row in range(0, len(wanted), step):
            piece, filled = wanted[row : row + step], target[row : row + step]
            start = place.start + (first_row + row) * row_bytes
            file.expect(start, AHEAD_BYTES)
            filled.copy_(piece)
            check_finite(filled, piece, name, file.path)
            file.forget(start, start + len(piece) * row_bytes)

    def close(self) -> None:
        for file in self.files:
            file.close()
