"""Chooses the reader for a prepared folder's weight format."""

from __future__ import annotations

import json
from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Checkpoint
from penstock_server.weights.folder import find_weights
from penstock_server.weights.location import Locator


def open_checkpoint(folder: Path) -> tuple[Checkpoint, Locator | None]:
    """Returns the folder's checkpoint, and where it keeps each parameter if its format has its own tensor names.

    The locator is None for formats that keep the names of the published model. Raises ConfigError when there are no
    weights, or a file is truncated or damaged.
    """
    files = find_weights(folder)
    if files.kind == "bin":
        raise ConfigError(f"{folder} is not prepared: PyTorch pickles must be converted to safetensors first")
    if files.kind == "gguf":
        from penstock_server.weights.gguf.checkpoint import GgufCheckpoint

        gguf = GgufCheckpoint(files.paths[0])
        return gguf, gguf.locator()
    from penstock_server.weights.safetensors_file import SafetensorsCheckpoint

    checkpoint = SafetensorsCheckpoint(files.paths, files.weight_map)
    if options := quantization_config(folder):
        from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint

        return QuantizedCheckpoint(checkpoint, options), None
    return checkpoint, None


def quantization_config(folder: Path) -> object:
    """The value of `quantization_config` in config.json; None if it has none."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None  # the model's reader reports it
