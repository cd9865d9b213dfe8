"""Chooses the weight files of a model folder. Imports no torch.

Formats in order of preference: safetensors, PyTorch pickles, GGUF. Within a format: a whole file, an index of a sharded
checkpoint, several files without an index. COMPAT: as in transformers, an index beside a whole file is not used, unless
it says that the file is one of several. An index whose files are all missing is a leftover of other weights: it is used
only if there are no others. The same choice is made from a repository's file list before a download.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.gguf.selection import Reference, choose_gguf
from penstock_server.weights.series import check_complete, series

SUFFIXES = {"safetensors": (".safetensors",), "bin": (".bin", ".pt", ".pth"), "gguf": (".gguf",)}
STEMS = {"safetensors": "model", "bin": "pytorch_model"}
INDEX_NAME = "model.safetensors.index.json"
# Files with a weight suffix that are not the model's weights: adapters, training state, Mistral's and Meta's second
# copy in another layout, exports for other programs.
NOT_WEIGHTS = re.compile(
    r"(adapter_|consolidated|optimizer|scheduler|scaler|training_args|rng_state|random_states|trainer_|"
    r"openvino_|tokenizer|params|tf_model|flax_model|\.).*",
    re.IGNORECASE,
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
DEFAULT_ADAPTER = "default-adapter"  # the folder, in that of a model, of the adapter that it is served with
IMAGE_ADAPTER = "vision-lora"  # the folder, in that of a model, of its adapter for prompts with images


@dataclass(frozen=True, slots=True)
class Choice:
    """The files of one checkpoint, by name."""

    kind: str  # "safetensors", "bin", "gguf", or "adapter": a LoRA adapter without its base
    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None  # tensor → file name, if there is an index
    note: str = ""  # for people: which index is not used


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one checkpoint, by path."""

    kind: str  # "safetensors", "bin", "gguf", or "adapter": a LoRA adapter without its base
    paths: tuple[Path, ...]
    weight_map: Mapping[str, str] | None = None  # tensor → file name, if there is an index
    note: str = ""  # for people: which index is not used


def check_layout(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigError if a config.json describes a checkpoint in the layout of the package mamba_ssm."""
    if "ssm_cfg" in config and "hidden_size" not in config:
        raise ConfigError(
            f"{path} is of the package mamba_ssm, whose checkpoints are not supported; use one in the layout of "
            "transformers, such as state-spaces/mamba-130m-hf in place of state-spaces/mamba-130m"
        )


def find_weights(folder: Path) -> WeightFiles:
    """Raises ConfigError when the folder holds no supported weights, or lacks files that its index names."""
    files = find_model(folder)
    if files.kind == "adapter":
        raise ConfigError(f"{folder} holds an adapter, not a model")
    return files


def find_model(folder: Path) -> WeightFiles:
    """The weights of a model, or of an adapter of the kind "adapter". Raises ConfigError as `find_weights`."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    # Repositories of split GGUF files have a folder for each quantization.
    names += [str(path.relative_to(folder)) for path in folder.glob("*/*.gguf")]
    choice = choose_weights(str(folder), names, lambda name: (folder / name).read_text(encoding="utf-8"))
    return WeightFiles(choice.kind, tuple(folder / name for name in choice.names), choice.weight_map, choice.note)


def find_gguf(folder: Path, reference: Reference) -> tuple[Path, ...]:
    """The files of the GGUF model in or below a folder that a reference names. Raises ConfigError if there is none."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    return tuple(folder / name for name in choose_gguf(str(folder), names, reference))


def choose_weights(where: str, names: Collection[str], read: Callable[[str], str]) -> Choice:
    """Chooses among the file names of a folder or repository.

    where: the place, for messages. read: returns the text of a file; only an index is read. Raises ConfigError when
    there are no weights, some are missing, or there are several models. Of GGUF quantizations it chooses Q4_K_M.
    """
    missing, note = tuple[str, ...](), ""
    for kind, stem in STEMS.items():
        suffix = SUFFIXES[kind][0]
        index, whole = f"{stem}{suffix}.index.json", stem + suffix
        if index in names:
            try:
                weight_map = _weight_map(where, index, read, SUFFIXES[kind])
            except ConfigError:
                if whole not in names:
                    raise
                weight_map = {}
            required = tuple(sorted(set(weight_map.values())))
            if whole in names and (whole not in required or len(required) == 1):
                note = "" if whole in required else f"{index} is not used, because there is {whole}"
            elif set(required).isdisjoint(names):
                missing, note = missing or required, f"{index} is not used, because its files are missing"
            else:
                check_complete(where, required, names, "its index names")
                return Choice(kind, required, weight_map)
        if whole in names:
            return Choice(kind, (whole,), note=note)
        several = tuple(sorted(name for name in names if is_weight_name(name, kind)))
        if several:
            check_complete(where, series(several), names, "their numbering implies")
            return Choice(kind, several, note=note)
    if ggufs := choose_gguf(where, names):
        return Choice("gguf", ggufs, note=note)
    check_complete(where, missing, names, "its index names")
    if ADAPTER_CONFIG in names:
        weights = next((name for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE) if name in names), None)
        if weights is None:
            raise ConfigError(f"{where} is an adapter without weights: it has no {ADAPTER_WEIGHTS}")
        return Choice("adapter", (weights,))
    others = sorted(name for name in names if name.endswith((".safetensors", ".bin", ".pth", ".pt")))
    beside = f"; it holds {', '.join(others[:3])}, whose tensors have other names" if others else ""
    raise ConfigError(
        f"{where} holds no weights in the layout of transformers: no model*.safetensors, no pytorch_model*.bin and no "
        f"*.gguf file{beside}"
    )


def is_weight_name(name: str, kind: str) -> bool:
    """Whether a file of this name may hold the model's weights."""
    return name.endswith(SUFFIXES[kind]) and not NOT_WEIGHTS.fullmatch(name)


def is_weight_or_index(name: str) -> bool:
    """Whether a file of this name belongs to the weights, in any format."""
    return name.endswith(".index.json") or any(is_weight_name(name, kind) for kind in SUFFIXES)


def _weight_map(where: str, index: str, read: Callable[[str], str], suffixes: tuple[str, ...]) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(read(index))["weight_map"]
        pairs = {str(tensor): file for tensor, file in weight_map.items()}
        files = sorted(set(pairs.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}/{index} is damaged: {error}") from error
    for file in files:
        if not isinstance(file, str) or re.search(r"[/\\\0]", file):
            raise ConfigError(f"{where}/{index} names files outside its folder: {file!r}")
        if not file.endswith(suffixes):
            raise ConfigError(f"{where}/{index} is damaged: it names {file!r}, which is not a {suffixes[0]} file")
    if not files:
        raise ConfigError(f"{where}/{index} is damaged: it names no tensors")
    return pairs
