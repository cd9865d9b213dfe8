"""The transformers library, which runs or configures what our decoder does not."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from penstock_server.errors import ConfigError

# What foreign code raises for an unsuitable model.
FOREIGN_ERRORS = (
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def read_config(folder: Path) -> Any:
    """The configuration in a folder as transformers completes it. Raises one of FOREIGN_ERRORS."""
    library = transformers()
    try:
        return library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config_class = library.CONFIG_MAPPING[values["model_type"]]
        return config_class.from_dict(with_integers(config_class, values))


def with_integers(config_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for a configuration class of transformers, with integers where it has no floats: it refuses 64.0."""
    kinds = {
        key: str(kind) for each in config_class.__mro__ for key, kind in getattr(each, "__annotations__", {}).items()
    }
    found: dict[str, Any] = {}
    for key, value in values.items():
        part = config_class.sub_configs.get(key)
        if isinstance(value, dict) and part is not None:
            model_type = value.get("model_type")
            of_part = (
                transformers().CONFIG_MAPPING[model_type] if model_type and part.__name__ == "AutoConfig" else part
            )
            found[key] = with_integers(of_part, value) if hasattr(of_part, "sub_configs") else value
            continue
        kind = kinds.get(config_class.attribute_map.get(key, key), "")
        is_integral = "int" in kind and "float" not in kind
        found[key] = _integral(value) if is_integral else value
    return found


def _integral(value: Any) -> Any:
    if isinstance(value, list):
        return [_integral(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def transformers() -> Any:
    """The library, an optional dependency. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"this model needs transformers: pip install '.[transformers]' in the source tree of Penstock ({error})"
        ) from error
