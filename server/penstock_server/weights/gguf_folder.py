"""A GGUF file → a folder in the standard layout in the cache, with a link to the file. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock_server.weights.cache import content_key, made_folder

# Part of every folder's key: raise it when the files written here change, and old folders are no longer found.
LAYOUT_VERSION = 3
LINK_NAME = "model.gguf"


def gguf_folder(path: Path, name: str) -> Path:
    """The prepared folder of a GGUF file, made when it is not there. Raises ConfigError when it cannot be made."""
    path = path.resolve()
    return made_folder(name, content_key(LAYOUT_VERSION, [path]), lambda folder: _write(folder, path))


def _write(folder: Path, path: Path) -> None:
    for file_name, content in _files(path).items():
        (folder / file_name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / LINK_NAME).symlink_to(path)


def _files(path: Path) -> dict[str, dict[str, Any]]:
    from penstock_server.weights.gguf_config import generation_config, model_config
    from penstock_server.weights.gguf_header import read_header
    from penstock_server.weights.gguf_metadata import Metadata
    from penstock_server.weights.gguf_tokenizer import tokenizer_config, tokenizer_json

    metadata = Metadata(read_header(path), path)
    return {
        "config.json": model_config(metadata),
        "generation_config.json": generation_config(metadata),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
