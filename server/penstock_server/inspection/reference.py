"""Finds the files of a model by its reference: a folder, a GGUF file, a hub id, or the embedded model."""

from __future__ import annotations

from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.inspection.files import ModelFiles
from penstock_server.inspection.local_model import inspect_folder, inspect_gguf
from penstock_server.prepare import EMBEDDED_MODEL_ID, embedded_gguf, local_gguf, looks_like_path
from penstock_server.weights.gguf.selection import Reference


def find_model(model_id: str | None, revision: str | None = None, *, with_code: bool = False) -> ModelFiles:
    """Never raises ConfigError: errors are added to `problems`. with_code: the Python files of a model on the hub are
    fetched, too."""
    files = ModelFiles(model_id or EMBEDDED_MODEL_ID)
    try:
        path = Path(model_id).expanduser() if model_id else embedded_gguf()
        if path.is_dir():
            inspect_folder(files, path.resolve(), "a folder")
        elif path.suffix.lower() == ".gguf" and path.is_file():
            inspect_gguf(files, path)
        elif path.is_file():
            raise ConfigError(f"{path} is a file but not a GGUF file; give a model folder, a .gguf file or a hub id")
        elif (gguf := local_gguf(str(model_id))) is not None:
            inspect_gguf(files, gguf)
        elif looks_like_path(str(model_id)):
            raise ConfigError(f"there is no file or folder {model_id}")
        else:
            from penstock_server.inspection.hub_model import inspect_hub

            inspect_hub(files, Reference.parse(str(model_id)), revision, with_code=with_code)
    except (ConfigError, OSError) as error:
        files.problems.append(str(error))
    return files
