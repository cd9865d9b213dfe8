"""The transformers library, which runs or configures what our decoder does not."""

from __future__ import annotations

import importlib
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


def transformers() -> Any:
    """The library, an optional dependency. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"this model needs transformers: pip install 'penstock[transformers]' ({error})") from error
