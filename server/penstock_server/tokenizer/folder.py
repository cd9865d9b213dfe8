"""Adds `tokenizer.json` to a model folder that lacks it: in a cached folder that links to all other files."""

from __future__ import annotations

import json
from pathlib import Path

from penstock_server.model_cache import content_key, made_folder
from penstock_server.tokenizer.slow import convert, vocabulary_files

# Part of every folder's key. Increment it when the same files give another tokenizer.json.
LAYOUT_VERSION = 2


def with_tokenizer(folder: Path, name: str) -> Path:
    """The cached folder, or `folder` itself if it has a `tokenizer.json` or no vocabulary to make one from.

    Raises ConfigError when the vocabulary's files are damaged, or the cache cannot be written.
    """
    if (folder / "tokenizer.json").is_file() or not vocabulary_files(folder):
        return folder
    files = sorted(path for path in folder.iterdir() if path.exists())
    return made_folder(f"{name}-tokenizer", content_key(LAYOUT_VERSION, files), lambda made: _write(folder, made))


def _write(folder: Path, made: Path) -> None:
    text = json.dumps(convert(folder), ensure_ascii=False, indent=1)
    (made / "tokenizer.json").write_text(text, encoding="utf-8")
    for path in folder.iterdir():
        (made / path.name).symlink_to(path.absolute())
