"""The files of a model and the tensors that they say they hold, wherever it is: no weights are read. Imports no torch,
but for pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_server.errors import ConfigError
from penstock_server.prepare import EMBEDDED_MODEL_ID, embedded_gguf, looks_like_path
from penstock_server.weights.folder import WeightFiles, find_weights
from penstock_server.weights.gguf_folder import gguf_folder
from penstock_server.weights.gguf_header import read_header

if TYPE_CHECKING:
    from penstock_server.weights.loader import NameSource


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is in its file."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Source:
    """A model's small files in a folder, and what is known of its weights."""

    name: str
    folder: Path | None = None  # None: there is nothing to look at
    origin: str = ""
    kind: str = ""  # of the weights
    files: dict[str, int] = field(default_factory=dict)  # of the weights, and their bytes
    tensors: Mapping[str, StoredTensor] | None = None  # by the names that the loader will use; None: not known
    own_names: NameSource | None = None  # where parameters are, where the format has names of its own
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_source(model_id: str | None, revision: str | None = None) -> Source:
    """Never raises ConfigError: what is wrong is among the problems."""
    source = Source(model_id or EMBEDDED_MODEL_ID)
    try:
        path = Path(model_id).expanduser() if model_id else embedded_gguf()
        if path.is_dir():
            _look_at_folder(source, path.resolve(), "a folder")
        elif path.suffix.lower() == ".gguf" and path.is_file():
            _look_at_gguf(source, path)
        elif path.is_file():
            raise ConfigError(f"{path} is a file but not a GGUF file; give a model folder, a .gguf file or a hub id")
        elif looks_like_path(str(model_id)):
            raise ConfigError(f"there is no file or folder {model_id}")
        else:
            _look_at_hub(source, str(model_id), revision)
    except (ConfigError, OSError) as error:
        source.problems.append(str(error))
    return source


def _look_at_folder(source: Source, folder: Path, origin: str) -> None:
    source.folder, source.origin = folder, f"{origin}, {folder}"
    if not any(folder.iterdir()):
        raise ConfigError(f"{folder} is empty; a model folder holds config.json, a tokenizer and weights")
    has_config = (folder / "config.json").is_file()
    try:
        files = find_weights(folder)
    except ConfigError as error:
        source.problems.append(str(error))
        return
    if files.kind == "gguf" and not has_config:
        _look_at_gguf(source, files.paths[0])
        return
    source.kind = files.kind
    source.files = {path.name: path.stat().st_size for path in files.paths}
    source.tensors = _stored(files, source)
    if files.kind == "gguf" and source.tensors is not None:
        source.own_names = _gguf_names(files.paths[0])


def _stored(files: WeightFiles, source: Source) -> dict[str, StoredTensor] | None:
    """Of all files, so that each can say what is wrong with it; None when not all could be read."""
    found: dict[str, StoredTensor] = {}
    places: dict[str, str] = {}
    num_problems = len(source.problems)
    # The first file of a GGUF model leads to the others.
    for path in files.paths[:1] if files.kind == "gguf" else files.paths:
        try:
            of_file = READERS[files.kind](path)
        except ConfigError as error:
            source.problems.append(str(error))
            continue
        for name in of_file.keys() & places.keys():
            source.problems.append(f"tensor {name} is in two files: {places[name]} and {path.name}")
        places.update(dict.fromkeys(of_file, path.name))
        found.update(of_file)
    if len(source.problems) > num_problems:
        return None
    for name, file_name in (files.weight_map or {}).items():
        if places.get(name) != file_name:
            source.problems.append(f"the index says that tensor {name} is in {file_name}, which does not hold it")
    return found


def _look_at_gguf(source: Source, path: Path) -> None:
    source.origin = f"a GGUF file, {path}"
    source.kind = "gguf"
    source.files = {part.name: part.stat().st_size for part in read_header(path).paths}
    source.folder = gguf_folder(path, path.stem if source.name != EMBEDDED_MODEL_ID else "SmolLM2-135M-Instruct")
    source.tensors, source.own_names = _read_gguf(path), _gguf_names(path)


def _look_at_hub(source: Source, model_id: str, revision: str | None) -> None:
    from penstock_server.inspection.hub_source import look_at_hub

    snapshot = look_at_hub(source, model_id, revision)
    if snapshot is not None:
        _look_at_folder(source, snapshot.folder, f"from the hub, commit {snapshot.sha}, in the cache")


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    from penstock_server.weights.safetensors_header import read_header

    return {name: StoredTensor(place.dtype, place.shape) for name, place in read_header(path).items()}


def _read_gguf(path: Path) -> dict[str, StoredTensor]:
    from gguf.constants import GGMLQuantizationType

    from penstock_server.weights.gguf_file import GgufCheckpoint

    checkpoint = GgufCheckpoint(path)
    tensors = {
        name: StoredTensor(GGMLQuantizationType(info.type_number).name, info.shape)
        for name, info in checkpoint.tensors.items()
    }
    checkpoint.close()
    return tensors


def _gguf_names(path: Path) -> NameSource:
    from penstock_server.weights.gguf_file import GgufCheckpoint

    checkpoint = GgufCheckpoint(path)
    names = checkpoint.own_names()
    checkpoint.close()
    return names


def _read_pickle(path: Path) -> dict[str, StoredTensor]:
    from penstock_server.weights.conversion import dtype_name
    from penstock_server.weights.torch_file import read_state_dict

    tensors = read_state_dict(path, device="meta")
    return {name: StoredTensor(dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}


READERS = {"safetensors": _read_safetensors, "gguf": _read_gguf, "bin": _read_pickle}
