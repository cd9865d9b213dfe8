"""Reads PyTorch's pickled state dicts without running what is in them: tensors, mapped where the file allows it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock_server.errors import ConfigError


def read_state_dict(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The file's tensors by name. On the device "meta" they have shapes and no values, and nothing is read.

    Raises ConfigError when the file is damaged, holds code, or is anything but a state dict.
    """
    content = _load(path, device)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a state dict (tensors by their names)")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{path} is not a state dict: under {name!r} it holds a {type(value).__name__}, not a tensor; "
                "save the model's own state_dict(), without what belongs to its training"
            )
        if value.layout is not torch.strided or value.is_quantized:
            raise ConfigError(f"{path}: tensor {name} is sparse or quantized, which is not supported")
    return dict(content)


def _load(path: Path, device: str) -> Any:
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is truncated: it has 0 bytes")
    # Files from before torch 1.6 are no archives and cannot be mapped.
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise ConfigError(_refusal(path, str(error))) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # What the unpickler and the archive's reader raise on bytes that mean nothing.
        raise ConfigError(
            f"{path} is truncated or damaged: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def _refusal(path: Path, message: str) -> str:
    name = re.search(r"GLOBAL ([\w.]+)", message)
    if name is None:
        # Without torch's advice to run the file all the same.
        reason = re.sub(r"^.*?trusted source\.|Check the documentation.*$", "", message, flags=re.DOTALL)
        return f"{path} is damaged, or holds more than tensors: {' '.join(reason.split())[:200]}"
    return (
        f"{path} holds code ({name[1]}), which is never run; only tensors are read from pickles. "
        "Take the model from a source that you trust, in safetensors"
    )
