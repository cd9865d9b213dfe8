"""A GGUF file → a folder in the standard layout in the cache, with a link to the file. Imports no torch.

INVARIANT: a folder under its final name is complete; it is written under another name and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError

# Part of every folder's key: raise it when the files written here change, and old folders are no longer found.
LAYOUT_VERSION = 1
LINK_NAME = "model.gguf"


def cache_root() -> Path:
    """$HF_HOME/penstock, so that a volume mounted for the hub's cache holds ours too."""
    home = os.environ.get("HF_HOME")
    base = (
        Path(home).expanduser()
        if home
        else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"
    )
    return base / "penstock"


def gguf_folder(path: Path, name: str) -> Path:
    """The prepared folder of a GGUF file, made when it is not there. Raises ConfigError when it cannot be made."""
    path = path.resolve()
    folder = cache_root() / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{_content_key(path)}"
    if not folder.is_dir():
        _write(folder, path)
    return folder


def _content_key(path: Path) -> str:
    status = path.stat()
    facts = f"{LAYOUT_VERSION}\n{path}\n{status.st_size}\n{status.st_mtime_ns}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _write(folder: Path, path: Path) -> None:
    files = _files(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to the model cache {folder.parent}: {error.strerror}; set HF_HOME") from error
    try:
        for file_name, content in files.items():
            (unfinished / file_name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
        (unfinished / LINK_NAME).symlink_to(path)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            # Another process was faster: its folder has the same content.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _files(path: Path) -> dict[str, dict[str, Any]]:
    from penstock_server.weights.gguf_config import Metadata, generation_config, model_config
    from penstock_server.weights.gguf_header import read_header
    from penstock_server.weights.gguf_tokenizer import tokenizer_config, tokenizer_json

    metadata = Metadata(read_header(path), path)
    return {
        "config.json": model_config(metadata),
        "generation_config.json": generation_config(metadata),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
