"""Reads the header of a safetensors file: the tensors and their offsets. Imports no torch.

Format: https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class Place:
    """The type, shape and byte range of a tensor in its file."""

    dtype: str  # the format's name
    shape: tuple[int, ...]
    start: int  # bytes, from the start of the file
    stop: int


def read_header(path: Path) -> dict[str, Place]:
    """Reads tensor name → place. Raises ConfigError when the file is truncated or its header is damaged."""
    text, size = _read_text(path)
    return parse_header(path, text, size)


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the file's metadata, which is empty if there is none. Raises ConfigError as `read_header`."""
    metadata = _parse(path, _read_text(path)[0]).get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConfigError(f"{path} is damaged: its metadata is not an object of strings")
    return metadata


def _read_text(path: Path) -> tuple[bytes, int]:
    """The header, and the size of the file."""
    size = path.stat().st_size
    if size <= LENGTH_BYTES:
        raise ConfigError(f"{path} is truncated: it has {size} bytes")
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if header_bytes > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise ConfigError(
                f"{path} is truncated or not a safetensors file: its header ends at byte "
                f"{LENGTH_BYTES + header_bytes}, the file at {size}"
            )
        return file.read(header_bytes), size


def parse_header(path: Path, text: bytes, size: int) -> dict[str, Place]:
    """Parses tensor name → place, and checks the places against the file size. path: for messages."""
    header = _parse(path, text)
    header.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(text)
    places = {name: _place(path, name, value, data_start, size) for name, value in header.items()}
    _check_apart(path, places)
    return places


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is damaged: its header is not a JSON object")
    return header


def _place(path: Path, name: str, value: dict[str, Any], data_start: int, size: int) -> Place:
    try:
        dtype, shape, (begin, end) = str(value["dtype"]), tuple(map(int, value["shape"])), value["data_offsets"]
        start, stop = data_start + int(begin), data_start + int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: the header's entry of tensor {name} is invalid") from error
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"{path}: tensor {name} is of type {dtype}, which is not supported")
    if stop > size:
        raise ConfigError(f"{path} is truncated: tensor {name} ends at byte {stop}, the file at {size}")
    if start < data_start or min(shape, default=0) < 0 or stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ConfigError(f"{path} is damaged: the byte range of tensor {name} does not match its shape {list(shape)}")
    return Place(dtype, shape, start, stop)


def _check_apart(path: Path, places: dict[str, Place]) -> None:
    filled = sorted((place.start, place.stop, name) for name, place in places.items() if place.stop > place.start)
    for (_, stop, name), (start, _, other) in itertools.pairwise(filled):
        if start < stop:
            raise ConfigError(f"{path} is damaged: tensors {name} and {other} overlap")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
    return values
