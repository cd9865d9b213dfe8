"""Reads the headers of a model's local files, but no weights. Imports torch only for pickles."""

from __future__ import annotations

from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.inspection.files import ModelFiles, StoredTensor
from penstock_server.weights.folder import WeightFiles, find_weights
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.header import read_header


def inspect_folder(files: ModelFiles, folder: Path, origin: str) -> None:
    """Fills `files` from a model folder. Raises ConfigError when the folder is empty."""
    files.folder, files.origin = folder, f"{origin}, {folder}"
    if not any(folder.iterdir()):
        raise ConfigError(f"{folder} is empty; a model folder holds config.json, a tokenizer and weights")
    try:
        weights = find_weights(folder)
    except ConfigError as error:
        files.problems.append(str(error))
        return
    if weights.kind == "gguf" and not (folder / "config.json").is_file():
        inspect_gguf(files, weights.paths[0])
        return
    files.kind = weights.kind
    files.notes += [weights.note] if weights.note else []
    files.sizes = {path.name: path.stat().st_size for path in weights.paths}
    _read_tensors(files, weights)


def inspect_gguf(files: ModelFiles, path: Path) -> None:
    """Fills `files` from a GGUF file, or from the first file of a split model."""
    files.origin = f"a GGUF file, {path}"
    files.kind = "gguf"
    files.sizes = {part.name: part.stat().st_size for part in read_header(path).paths}
    files.folder = gguf_folder(path)
    _read_gguf(files, path)


def _read_tensors(files: ModelFiles, weights: WeightFiles) -> None:
    """Reads every file, so that all damaged files are reported. Leaves `tensors` None when any file is damaged."""
    found: dict[str, StoredTensor] = {}
    places: dict[str, str] = {}
    num_problems = len(files.problems)
    if weights.kind == "gguf":
        try:
            _read_gguf(files, weights.paths[0])
        except ConfigError as error:
            files.problems.append(str(error))
        return
    read = _read_safetensors if weights.kind == "safetensors" else _read_pickle
    for path in weights.paths:
        try:
            tensors = read(path)
        except ConfigError as error:
            files.problems.append(str(error))
            continue
        for name in tensors.keys() & places.keys():
            files.problems.append(f"tensor {name} is in two files: {places[name]} and {path.name}")
        places.update(dict.fromkeys(tensors, path.name))
        found.update(tensors)
    if len(files.problems) > num_problems:
        return
    for name, file_name in (weights.weight_map or {}).items():
        if places.get(name) != file_name:
            files.problems.append(f"the index says that tensor {name} is in {file_name}, which does not hold it")
    try:
        files.hold(found)
    except ConfigError as error:
        files.problems.append(str(error))


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    from penstock_server.weights.safetensors_header import read_header

    return {name: StoredTensor(place.dtype, place.shape) for name, place in read_header(path).items()}


def _read_gguf(files: ModelFiles, path: Path) -> None:
    from gguf.constants import GGMLQuantizationType

    from penstock_server.weights.gguf.checkpoint import GgufCheckpoint

    checkpoint = GgufCheckpoint(path)
    files.tensors = {
        name: StoredTensor(GGMLQuantizationType(info.type_number).name, info.shape)
        for name, info in checkpoint.tensors.items()
    }
    files.locator = checkpoint.locator()
    checkpoint.close()


def _read_pickle(path: Path) -> dict[str, StoredTensor]:
    from penstock_server.weights.conversion import dtype_name
    from penstock_server.weights.torch_file import read_state_dict

    tensors = read_state_dict(path, device="meta")
    return {name: StoredTensor(dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
