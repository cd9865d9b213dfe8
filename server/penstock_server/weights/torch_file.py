"""Reads PyTorch's pickled state dicts without executing code from them. Tensors are mapped if the format allows it."""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock_server.errors import ConfigError


def read_state_dict(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The file's tensors by name. On the device "meta" only shapes and types are read.

    Raises ConfigError when the file is damaged, contains code, or is not a state dict.
    """
    content = _load(path, device)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a state dict (tensors by name)")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{path} is not a state dict: {name!r} is a {type(value).__name__}, not a tensor; save only the "
                "model's state_dict(), without training state"
            )
        if value.layout is not torch.strided or value.is_quantized:
            raise ConfigError(f"{path}: tensor {name} is sparse or quantized, which is not supported")
    return dict(content)


def _load(path: Path, device: str) -> Any:
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is truncated: it has 0 bytes")
    # Files written before torch 1.6 are not zip archives and cannot be mapped.
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise ConfigError(_refusal(path, str(error))) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # Raised by the unpickler and the zip reader on damaged files. The latter seeks beyond the start of a short one.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ConfigError(
            f"{path} is truncated or damaged: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def _refusal(path: Path, message: str) -> str:
    name = re.search(r"GLOBAL ([\w.]+)", message)
    if name is None:
        # Drop torch's advice to disable weights_only.
        reason = re.sub(r"^.*?trusted source\.|Check the documentation.*$", "", message, flags=re.DOTALL)
        return f"{path} is damaged or contains more than tensors: {' '.join(reason.split())[:200]}"
    return (
        f"{path} contains code ({name[1]}), which is never executed; only tensors are read from pickles. "
        "Use a safetensors version of the model from a source that you trust"
    )
