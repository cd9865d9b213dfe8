"""Makes a model folder in the standard layout for a GGUF model, with links to its files. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_server.host.model_cache import content_key, made_folder

if TYPE_CHECKING:
    from penstock_server.weights.gguf.metadata import Metadata

# Part of every folder's key. Increment it when the files written here change, so that old folders are not reused.
LAYOUT_VERSION = 7


def gguf_folder(path: Path) -> Path:
    """The prepared folder of a GGUF file, or of the first file of a split model, made if it is not in the cache.

    Raises ConfigError when it cannot be made.
    """
    path = path.absolute()
    return made_folder(path.stem, content_key(LAYOUT_VERSION, [path.resolve()]), lambda folder: _write(folder, path))


def _write(folder: Path, path: Path) -> None:
    from penstock_server.weights.gguf.header import read_header
    from penstock_server.weights.gguf.metadata import Metadata

    metadata = Metadata(read_header(path), path)
    for file_name, content in _files(metadata).items():
        (folder / file_name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    paths = metadata.header.paths
    for number, part in enumerate(paths, start=1):
        link = f"model-{number:05}-of-{len(paths):05}.gguf" if len(paths) > 1 else "model.gguf"
        (folder / link).symlink_to(part.resolve())


def _files(metadata: Metadata) -> dict[str, dict[str, Any]]:
    from penstock_server.weights.gguf.config import generation_config, model_config
    from penstock_server.weights.gguf.tokenizer import tokenizer_config, tokenizer_json

    return {
        "config.json": model_config(metadata),
        "generation_config.json": generation_config(metadata),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
