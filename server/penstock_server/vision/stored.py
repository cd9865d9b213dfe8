"""The settings of a model's image processor, as its folder stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError

_QWEN_MAX_PIXELS = 28 * 28 * 1280  # limit of Qwen2VLImageProcessor


def stored_settings(folder: Path, types: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings that are not null, if the image processor is of one of these types, else None. Raises
    ConfigError."""
    settings = _settings(folder)
    return settings if settings.get("image_processor_type") in types else None


def stored_max_pixels(folder: Path) -> int:
    """The most pixels of an image after Qwen's image processor has resized it. Raises ConfigError."""
    settings = _settings(folder)
    size = settings.get("size")
    found = settings.get("max_pixels", size.get("longest_edge") if isinstance(size, dict) else None)
    return found if type(found) is int and found > 0 else _QWEN_MAX_PIXELS


def _settings(folder: Path) -> dict[str, Any]:
    """Settings that are not null."""
    settings: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            try:
                stored = json.loads((folder / name).read_text(encoding="utf-8"))
                settings |= stored.get("image_processor", stored)
            except (ValueError, AttributeError, TypeError) as error:
                raise ConfigError(f"{folder / name} is no object of JSON: {error}") from error
    return {key: value for key, value in settings.items() if value is not None}


def stored_side(size: Any) -> int:
    """The side of a square in pixels; 0: it is no square, or has no pixel."""
    side = size.get("height") if isinstance(size, dict) and size.get("height") == size.get("width") else None
    return side if type(side) is int and side > 0 else 0
