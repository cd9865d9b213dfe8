"""Converts PyTorch pickles to safetensors, in a cached folder that links to the model's other files.

Names, types and values stay the same. The weights are converted once. The links are renewed each time the folder is
requested, so that a tokenizer or template may change without another conversion.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_server.errors import ConfigError
from penstock_server.host.model_cache import content_key, made_folder
from penstock_server.host.progress import Progress
from penstock_server.weights.folder import INDEX_NAME, WeightFiles, is_weight_or_index
from penstock_server.weights.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT_VERSION = 2  # increment when the written files change
MAX_SHARD_BYTES = 5_000_000_000
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def converted_folder(folder: Path, files: WeightFiles, name: str) -> Path:
    """The cached folder with the converted weights, made if it is missing.

    Raises ConfigError when a file is damaged or not a state dict, or the cache has no room.
    """
    key = content_key(LAYOUT_VERSION, [path.resolve() for path in files.paths])
    num_bytes = sum(path.stat().st_size for path in files.paths)
    made = made_folder(name, key, lambda target: _convert(files.paths, target, num_bytes), num_bytes)
    _renew_links(folder, made)
    return made


def _convert(paths: Iterable[Path], target: Path, num_bytes: int) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    from penstock_server.weights.torch_file import read_state_dict

    tensors: dict[str, Tensor] = {}
    sources: dict[str, Path] = {}
    with Progress(f"converting {num_bytes / 1e9:.1f} GB of pickles to safetensors (only once)", num_bytes) as progress:
        for path in paths:
            for name, tensor in read_state_dict(path).items():
                if name in sources:
                    raise ConfigError(f"tensor {name} is in two files: {sources[name].name} and {path.name}")
                if dtype_name(tensor) not in ITEM_BYTES:
                    raise ConfigError(f"tensor {name} is of type {dtype_name(tensor)}, which cannot be converted")
                tensors[name], sources[name] = tensor, path
        if not tensors:
            raise ConfigError(f"{', '.join(path.name for path in paths)}: no tensors found")
        # PERF: not split_torch_state_dict_into_shards, which imports torch.distributed: 3 s of CPU time.
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_SHARD_BYTES,
        )
        for file_name, names in split.filename_to_tensors.items():
            _write(target / file_name, {name: tensors[name] for name in names})
            progress.advance((target / file_name).stat().st_size)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes and syncs one file.

    Tensors are written directly from the mapped pickle. Only views, and tensors that share their storage with another
    tensor of the file, are copied first, because the format supports neither.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
        if not is_whole or storage.data_ptr() in storages:
            tensors[name] = tensor.contiguous().clone()
        storages.add(storage.data_ptr())
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    with path.open("rb") as file:
        os.fsync(file.fileno())


def dtype_name(tensor: Tensor) -> str:
    """The tensor's type as safetensors names it, or torch's name for a type without one."""
    name = str(tensor.dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def _renew_links(source: Path, made: Path) -> None:
    """Makes `made` link to every other file of `source`, and removes links to files that are gone."""
    wanted = {path.name: path for path in source.resolve().iterdir() if not is_weight_or_index(path.name)}
    for path in made.iterdir():
        if path.is_symlink() and (path.name not in wanted or path.readlink() != wanted[path.name]):
            path.unlink(missing_ok=True)
    for name, path in wanted.items():
        try:
            (made / name).symlink_to(path)
        except FileExistsError:
            continue  # it exists already, or another process was faster
