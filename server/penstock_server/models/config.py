"""Reads `config.json`, in the spelling of transformers 5 and of those before, with errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from penstock_server.errors import ConfigError
from penstock_server.layers.rope import RopeSpec

T = TypeVar("T", int, float, bool, str)

LATER_ROPE_KINDS = ("yarn", "longrope", "su", "mrope")


class Config:
    """A parsed `config.json`. A key with the value null counts as absent, as in transformers."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    @classmethod
    def read(cls, folder: Path) -> Config:
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no config.json, so it is not a model folder") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(values, path)

    def get(self, key: str, default: T) -> T:
        """The value of the default's type."""
        value = self.values.get(key)
        return default if value is None else self._typed(key, value, type(default))

    def require(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks {key}")
        return self._typed(key, value, kind)

    def optional_int(self, key: str) -> int | None:
        value = self.values.get(key)
        return None if value is None else self._typed(key, value, int)

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.path}: {key} must be of type {kind.__name__}, not {value!r}")
        return value

    def refuse(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}")

    def rope(self, head_dim: int, default_theta: float = 10000.0) -> RopeSpec:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`; ConfigError for other kinds."""
        parameters = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise self.refuse("rope parameters that differ between layers are not supported")
        rope = Config(parameters, self.path)
        theta = rope.get("rope_theta", self.get("rope_theta", default_theta))
        if rope.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0)) != 1.0:
            raise self.refuse("rope over a part of the head is not supported for this architecture")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in ("default", "dynamic"):
            # Dynamic scaling changes nothing up to `max_position_embeddings`, the longest sequence we serve.
            return RopeSpec("default", theta, head_dim)
        if kind == "linear":
            return RopeSpec("linear", theta, head_dim, factor=rope.require("factor", float))
        if kind == "llama3":
            return RopeSpec(
                "llama3",
                theta,
                head_dim,
                factor=rope.require("factor", float),
                low_freq_factor=rope.require("low_freq_factor", float),
                high_freq_factor=rope.require("high_freq_factor", float),
                original_max_tokens=rope.get(
                    "original_max_position_embeddings", self.require("max_position_embeddings", int)
                ),
            )
        later = " yet" if kind in LATER_ROPE_KINDS else ""
        raise self.refuse(f"rope scaling {kind!r} is not supported{later}; supported: default, dynamic, linear, llama3")
