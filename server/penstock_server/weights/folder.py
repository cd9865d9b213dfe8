"""What lies in a model folder: which files hold its weights. Imports no torch.

Order of preference: the index of a sharded checkpoint, one safetensors file, several without an index, one GGUF file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from penstock_server.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Not the model's own weights, though they end like them: an adapter, and Mistral's second copy in another layout.
IGNORED_PREFIXES = ("adapter_", "consolidated")
UNSUPPORTED_BIN = "as .bin files, which are not supported yet; convert them to safetensors"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one checkpoint, all of one kind."""

    kind: str  # "safetensors" or "gguf"
    paths: tuple[Path, ...]


def find_weights(folder: Path) -> WeightFiles:
    """Raises ConfigError when the folder holds no weights that can be read, or not all that its index names."""
    if (folder / INDEX_NAME).is_file():
        return WeightFiles("safetensors", _indexed(folder))
    if (folder / SINGLE_NAME).is_file():
        return WeightFiles("safetensors", (folder / SINGLE_NAME,))
    several = tuple(sorted(path for path in folder.glob("*.safetensors") if is_weight_name(path.name)))
    if several:
        return WeightFiles("safetensors", several)
    ggufs = tuple(sorted(folder.glob("*.gguf")))
    if len(ggufs) == 1:
        return WeightFiles("gguf", ggufs)
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise ConfigError(f"{folder} holds several GGUF files ({names}); give the path of one of them as --model-id")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ConfigError(f"{folder} holds its weights only {UNSUPPORTED_BIN}")
    raise ConfigError(f"{folder} holds no weights: no *.safetensors and no *.gguf file")


def is_weight_name(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(IGNORED_PREFIXES)


def _indexed(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_NAME
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is damaged: {error}") from error
    if any("/" in name or "\\" in name for name in names):
        raise ConfigError(f"{index} names files outside its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files that its index names, e.g. {missing[0]}"
        )
    return tuple(folder / name for name in names)
