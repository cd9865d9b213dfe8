"""PyTorch's pickles → a folder in the cache with the same tensors as safetensors, beside links to all other files.

Names, types and values stay. The weights are converted once; the links are renewed whenever the folder is asked for, so
that a tokenizer or a template may change without that.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from penstock_server.errors import ConfigError
from penstock_server.model_cache import content_key, made_folder
from penstock_server.progress import Progress
from penstock_server.weights.folder import INDEX_NAME, WeightFiles, is_weight_or_index
from penstock_server.weights.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT_VERSION = 1  # raise it when what is written here changes
MAX_SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 16 << 20
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
    """Raises ConfigError when a file is no state dict, is damaged, or the cache has no room."""
    key = content_key(LAYOUT_VERSION, [path.resolve() for path in files.paths])
    num_bytes = sum(path.stat().st_size for path in files.paths)
    made = made_folder(name, key, lambda target: _convert(files.paths, target, num_bytes), num_bytes)
    _renew_links(folder, made)
    return made


def _convert(paths: Iterable[Path], target: Path, num_bytes: int) -> None:
    from penstock_server.weights.torch_file import read_state_dict

    sources: dict[str, Path] = {}
    shards: list[list[str]] = []
    with Progress(f"converting {num_bytes / 1e9:.1f} GB to safetensors, once", num_bytes) as progress:
        for path in paths:
            tensors = read_state_dict(path)
            for name in tensors:
                if name in sources:
                    raise ConfigError(f"tensor {name} is in two files: {sources[name].name} and {path.name}")
                sources[name] = path
            for names in _shards(tensors):
                with (target / f"{len(shards)}.part").open("wb") as file:
                    write_safetensors(file, {name: tensors[name] for name in names}, progress)
                shards.append(names)
    if not sources:
        raise ConfigError(f"{', '.join(path.name for path in paths)} hold no tensors")
    _name_shards(target, shards, sum(path.stat().st_size for path in target.glob("*.part")))


def _shards(tensors: dict[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        if names and filled + tensor.nbytes > MAX_SHARD_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += tensor.nbytes
    if names:
        yield names


def _name_shards(target: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Names as the hub has them; the index only where there are several."""
    if len(shards) == 1:
        (target / "0.part").rename(target / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"{number}.part").rename(target / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (target / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_safetensors(file: BinaryIO, tensors: dict[str, Tensor], progress: Progress) -> None:
    """One after the other, so that no more than a piece of one is in memory; on the disk when it returns.

    A view is written as what it shows and a storage that several tensors share once for each: the format knows neither.
    """
    import torch

    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor)
        if dtype not in ITEM_BYTES:
            raise ConfigError(f"tensor {name} is of type {dtype}, which safetensors does not know")
        stop = offset + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors lie at multiples of eight
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        if tensor.numel() == 0:
            continue
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        step = max(1, PIECE_BYTES // max(1, rows[0].nbytes))
        for piece in rows.split(step):
            file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
            progress.advance(piece.nbytes)
    file.flush()
    os.fsync(file.fileno())


def dtype_name(tensor: Tensor) -> str:
    """What safetensors calls the type; torch's own name where it has none."""
    name = str(tensor.dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def _renew_links(source: Path, made: Path) -> None:
    """Links in `made` to whatever else lies in `source`, and to nothing that is gone."""
    wanted = {path.name: path for path in source.resolve().iterdir() if not is_weight_or_index(path.name)}
    for path in made.iterdir():
        if path.is_symlink() and (path.name not in wanted or path.readlink() != wanted[path.name]):
            path.unlink(missing_ok=True)
    for name, path in wanted.items():
        try:
            (made / name).symlink_to(path)
        except FileExistsError:
            continue  # there already, or another process was faster
