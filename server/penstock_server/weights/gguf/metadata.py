"""Typed access to the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.gguf.header import GgufHeader

F32 = 0  # GGMLQuantizationType


class Metadata:
    """The metadata of one file. Errors name the file and the key."""

    def __init__(self, header: GgufHeader, path: Path) -> None:
        self.header = header
        self.path = path
        self.architecture = str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a full key."""
        return self.header.metadata.get(key, default)

    def require(self, key: str) -> Any:
        """The value of a full key. Raises ConfigError when it is missing."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks the metadata {key}")
        return value

    def model(self, key: str, default: Any = None) -> Any:
        """The value of a key in the architecture's section."""
        return self.get(f"{self.architecture}.{key}", default)

    def require_model(self, key: str) -> Any:
        """The value of a key in the architecture's section. Raises ConfigError when it is missing."""
        return self.require(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of the architecture's section; required without a default.

        Raises ConfigError when the file holds an array whose values differ between layers.
        """
        value = self.require_model(key) if default is None else self.model(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.error(f"{self.architecture}.{key} differs between layers, which is not supported")
            value = value[0]
        if not isinstance(value, int) and not (isinstance(value, float) and value.is_integer()):
            raise self.error(f"{self.architecture}.{key} is {value!r}, must be an integer")
        return int(value)

    def size(self, key: str, default: int | None = None) -> int:
        """Like `integer`, but at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.error(f"{self.architecture}.{key} is {value}, must be at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float of the architecture's section; required without a default."""
        value = self.require_model(key) if default is None else self.model(key, default)
        if not isinstance(value, int | float):
            raise self.error(f"{self.architecture}.{key} is {value!r}, must be a number")
        return shortest_float32(value)

    def has(self, tensor: str) -> bool:
        """Whether the model has a tensor of this name."""
        return tensor in self.header.tensors

    def floats(self, tensor: str, count: int) -> list[float]:
        """Reads a small float32 tensor of `count` numbers, which becomes part of the configuration."""
        info = self.header.tensors[tensor]
        if info.type_number != F32 or info.shape != (count,):
            raise self.error(f"{tensor} is not a float32 vector of {count} numbers")
        with self.header.paths[info.file].open("rb") as file:
            file.seek(info.offset)
            data = file.read(4 * count)
        if len(data) != 4 * count:
            raise self.error(f"the file is truncated: {tensor} ends beyond it")
        return list(struct.unpack(f"<{count}f", data))

    def error(self, message: str) -> ConfigError:
        """An error that names the file."""
        return ConfigError(f"{self.path}: {message}")


def shortest_float32(value: float) -> float:
    """The shortest decimal number with the same float32 value: 9.999999747378752e-06 → 1e-05."""
    stored = struct.pack("<f", value)
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == stored:
            return shorter
    return float(value)
