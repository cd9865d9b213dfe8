"""Makes a model folder whose `tokenizer.json` says everything: a cached folder that links to all other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock_server.host.model_cache import content_key, made_folder
from penstock_server.tokenizer.completion import TOKENIZER, completed_files, is_complete
from penstock_server.tokenizer.settings import read_object
from penstock_server.tokenizer.slow import convert, vocabulary_files

# Part of every folder's key. Increment it when the same files give another tokenizer.json.
LAYOUT_VERSION = 3


def with_tokenizer(folder: Path, name: str) -> Path:
    """The cached folder, or `folder` itself if its `tokenizer.json` is complete or it has no vocabulary to make one.

    Raises ConfigError when the tokenizer's files are damaged, or the cache cannot be written.
    """
    if is_complete(folder) if (folder / TOKENIZER).is_file() else not vocabulary_files(folder):
        return folder
    files = sorted(path for path in folder.iterdir() if path.exists())
    return made_folder(f"{name}-tokenizer", content_key(LAYOUT_VERSION, files), lambda made: _write(folder, made))


def made_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of the cached folder that are no links, by name. Raises ConfigError when the folder is damaged."""
    if (folder / TOKENIZER).is_file():
        return {} if is_complete(folder) else completed_files(folder, read_object(folder / TOKENIZER))
    converted = convert(folder)
    # The conversion has read the other files.
    return {**completed_files(folder, converted), TOKENIZER: converted}


def _write(folder: Path, made: Path) -> None:
    files = made_files(folder)
    for name, content in files.items():
        (made / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        if path.name not in files:
            (made / path.name).symlink_to(path.absolute())
