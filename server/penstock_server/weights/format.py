"""Chooses the reader for a prepared folder's weight format."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Checkpoint
from penstock_server.weights.folder import find_weights
from penstock_server.weights.location import Locator
from penstock_server.weights.wrapper import renamings

logger = logging.getLogger(__name__)

# Files in which AutoGPTQ and AWQ describe a checkpoint whose config.json does not, in the order in which they are
# looked for, with the method of a file that does not name it. COMPAT: TGI reads the same files.
_DESCRIPTIONS = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
# ModelOpt's description, which counts before them.
_MODELOPT = "hf_quant_config.json"
# The key of llm-compressor's first versions.
_COMPRESSION = "compression_config"
# AWQ's names of options that `quantization_config` names otherwise.
_SPELLINGS = {"w_bit": "bits", "q_group_size": "group_size"}
_OF_AWQ = {"w_bit", "q_group_size", "zero_point", "version"}


def open_checkpoint(folder: Path) -> tuple[Checkpoint, Locator | None]:
    """Returns the folder's checkpoint, and where it keeps each parameter if its format has its own tensor names.

    The locator is None for formats that keep the names of the published model. Raises ConfigError when there are no
    weights, or a file is truncated or damaged.
    """
    files = find_weights(folder)
    if files.kind == "bin":
        raise ConfigError(f"{folder} is not prepared: PyTorch pickles must be converted to safetensors first")
    if files.kind == "gguf":
        from penstock_server.weights.gguf.checkpoint import GgufCheckpoint

        gguf = GgufCheckpoint(files.paths[0])
        return gguf, gguf.locator()
    from penstock_server.weights.safetensors_file import SafetensorsCheckpoint

    checkpoint = SafetensorsCheckpoint(files.paths, files.weight_map)
    if checkpoint.wrapper_note:
        logger.info(checkpoint.wrapper_note)
    if options := quantization_config(folder):
        from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint

        return QuantizedCheckpoint(checkpoint, options), None
    return checkpoint, None


def transformers_renamings(folder: Path) -> dict[str, str]:
    """What transformers must remove from the tensor names of a prepared folder with safetensors: its `key_mapping`."""
    from penstock_server.weights.safetensors_header import read_header

    return renamings([name for path in find_weights(folder).paths for name in read_header(path)])


def quantization_config(folder: Path) -> object:
    """The value of `quantization_config` in config.json, or else the options in a file of the tool that quantized the
    checkpoint, in the same form. None: nothing says that it is quantized. Raises ConfigError if such a file is damaged.
    """
    if options := _of_config(folder / "config.json"):
        return _unfolded(options) if isinstance(options, dict) else options
    if options := _of_modelopt(folder / _MODELOPT):
        return options
    return next(
        (options for name, method in _DESCRIPTIONS if (options := _of_tool(folder / name, method)) is not None), None
    )


def _of_config(path: Path) -> object:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        parts = (config, config.get("text_config") or {})
        given = (part.get(key) for part in parts for key in ("quantization_config", _COMPRESSION))
        return _with_integers(next((options for options in given if options), None))
    except (OSError, ValueError, AttributeError):
        return None  # the model's reader reports it


def _of_modelopt(path: Path) -> dict[str, Any] | None:
    """The options in ModelOpt's file; None if there is none, or if only keys and values are quantized."""
    values = _read_object(path)
    options = _unfolded(values or {})
    return options if options.get("quant_algo") else None


def _unfolded(options: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt's options, which are under `quantization` in some versions, with the method's name. Others stay."""
    inner = options.get("quantization")
    return {"quant_method": "modelopt", **options, **inner} if isinstance(inner, dict) else options


def _of_tool(path: Path, method: str) -> dict[str, Any] | None:
    """The options in a file of _DESCRIPTIONS, None if there is no such file. method: if the file implies no other."""
    values = _read_object(path)
    if values is None:
        return None
    options: dict[str, Any] = {str(_SPELLINGS.get(key, key)): value for key, value in values.items()}
    if not options.keys() & {"bits", "quant_method"}:
        return None  # another tool uses the name for something else
    implied = "awq" if values.keys() & _OF_AWQ else method
    return {**options, "quant_method": options.get("quant_method") or implied}


def _read_object(path: Path) -> dict[str, Any] | None:
    """None if there is no such file. Raises ConfigError if it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return dict(_with_integers(values))


def _with_integers(value: Any) -> Any:
    """JSON with integers in place of integral floats, which some tools write."""
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
