"""The tensors of an adapter, in safetensors or in a pickle of older versions of PEFT, whose code is never executed."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from penstock_server.device.quantized import QuantizedMatrix
from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Checkpoint, Part
from penstock_server.weights.folder import ADAPTER_PICKLE, ADAPTER_WEIGHTS
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from penstock_server.weights.torch_file import read_state_dict

# PEFT's modules hold their adapters by name, which some tools save with the tensors: lora_A.default.weight.
_OF_NAMED = re.compile(r"(.*\.lora_(?:embedding_)?[AB])\.(\w+?)((?:\.weight)?)")
_PLAIN = "weight"


def open_adapter(folder: Path) -> tuple[Path, Checkpoint]:
    """An adapter's file, and its tensors by the names that current versions of PEFT give them. Raises ConfigError if
    there is none, or if it is damaged."""
    safetensors, pickled = folder / ADAPTER_WEIGHTS, folder / ADAPTER_PICKLE
    path = safetensors if safetensors.is_file() or not pickled.is_file() else pickled
    if not path.is_file():
        raise ConfigError(f"{folder} holds neither {ADAPTER_WEIGHTS} nor {ADAPTER_PICKLE}")
    try:
        checkpoint = SafetensorsCheckpoint((path,)) if path == safetensors else _StateDict(read_state_dict(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return path, _Renamed(checkpoint, _stored_names(path, checkpoint.names()))


def _stored_names(path: Path, stored: Collection[str]) -> dict[str, str]:
    """The stored names by the plain ones. Raises ConfigError if the file holds several adapters."""
    found: dict[str, str] = {}
    adapters: set[str] = set()
    for name in stored:
        match = _OF_NAMED.fullmatch(name)
        plain = name
        if match is not None and match[2] != _PLAIN:
            plain = match[1] + match[3]
            adapters.add(match[2])
        found[plain] = name
    if len(adapters) > 1 or len(found) < len(stored):
        raise ConfigError(f"{path} holds several adapters: {', '.join(sorted(adapters))}; save one of them alone")
    return found


class _Renamed:
    """A checkpoint whose tensors have other names."""

    def __init__(self, checkpoint: Checkpoint, stored: dict[str, str]) -> None:
        self._checkpoint = checkpoint
        self._stored = stored

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._stored[name])

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        self._checkpoint.read(self._stored[name], part, out)

    def has_independent_rows(self, name: str) -> bool:
        return self._checkpoint.has_independent_rows(self._stored[name])

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        return None

    def close(self) -> None:
        self._checkpoint.close()


class _StateDict:
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, part: Part | None, out: Tensor) -> None:
        tensor = self._tensors[name]
        out.copy_(tensor if part is None else part.of(tensor))

    def has_independent_rows(self, name: str) -> bool:
        return True

    def quantized(self, name: str, part: Part | None) -> tuple[QuantizedMatrix, ...] | None:
        return None

    def close(self) -> None:
        self._tensors = {}
