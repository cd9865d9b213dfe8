"""Reads `config.json` in the spellings of transformers 5 and of earlier versions. Errors name the file and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from penstock_server.device.activation import ACTIVATIONS
from penstock_server.errors import ConfigError
from penstock_server.models.context import default_position_tokens, max_position_tokens
from penstock_server.weights.folder import check_layout

T = TypeVar("T", int, float, bool, str)


class Config:
    """A parsed `config.json`. A key whose value is null counts as absent, as in transformers. An integer may be written
    as 64.0 or 1e6, as some tools do."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    @classmethod
    def read(cls, folder: Path) -> Config:
        try:
            config = cls.of_file(folder / "config.json")
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no config.json, so it is not a model folder") from None
        check_layout(config.path, config.values)
        return config

    @classmethod
    def of_file(cls, path: Path) -> Config:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(values, path)

    def with_defaults(self, **defaults: Any) -> Config:
        """With the values that transformers uses for keys that are absent; a key with the value null is present."""
        return Config({**defaults, **self.values}, self.path)

    def renamed(self, **spellings: str) -> Config:
        """With the values of other spellings of keys that are absent. spellings: key → its other name."""
        values = {key: self.values[other] for key, other in spellings.items() if self.values.get(other) is not None}
        return Config({**values, **self.values}, self.path)

    def part(self, values: dict[str, Any]) -> Config:
        """An object in the file, as a configuration of its own."""
        return Config(values, self.path)

    @property
    def max_position_tokens(self) -> int:
        """Longest sequence in tokens, see `context.max_position_tokens`."""
        return max_position_tokens(self)

    @property
    def default_position_tokens(self) -> int:
        """Longest sequence in tokens that is served by default, see `context.default_position_tokens`."""
        return default_position_tokens(self)

    def get(self, key: str, default: T) -> T:
        """The value, which must be of the default's type."""
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

    def integers(self, key: str) -> list[int] | None:
        """A list of integers, or None if the key is absent."""
        values = self.values.get(key)
        if values is not None and not isinstance(values, list):
            raise self.refuse(f"{key} must be a list of integers, not {values!r}")
        return None if values is None else [self._typed(key, value, int) for value in values]

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of as many numbers as the default has."""
        values = self.values.get(key)
        if values is None:
            return default
        if not isinstance(values, list | tuple) or len(values) != len(default):
            raise self.refuse(f"{key} must be a list of {len(default)} numbers, not {values!r}")
        # COMPAT: transformers 5 writes an infinite number as an object.
        plain = [float(value["__float__"]) if isinstance(value, dict) else value for value in values]
        return tuple(self._typed(key, value, float) for value in plain)

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return kind(value)
        if kind is bool and value in (0, 1) and isinstance(value, int):
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.path}: {key} must be of type {kind.__name__}, not {value!r}")
        return value

    def refuse(self, what: str) -> ConfigError:
        """The error to raise."""
        return ConfigError(f"{self.path}: {what}")

    def window(self, key: str = "sliding_window") -> int | None:
        """The sliding window in tokens; None if there is none, or if no sequence can be longer."""
        window = self.optional_int(key)
        if window is None or window >= self.max_position_tokens:
            return None
        if window < 1:
            raise self.refuse(f"{key} must be at least 1, not {window}")
        return window

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        name = self.get(key, default)
        if name not in ACTIVATIONS:
            raise self.refuse(f"{key} {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
        return name

    def heads(self, num: str = "num_attention_heads", hidden: str = "hidden_size") -> tuple[int, int]:
        """The number of query heads and their dimension. num, hidden: the keys of the heads and of the hidden size."""
        num_heads = self.require(num, int)
        if num_heads < 1:
            raise self.refuse(f"{num} must be at least 1, not {num_heads}")
        head_dim = self.get("head_dim", self.require(hidden, int) // num_heads)
        if head_dim < 1:
            raise self.refuse(f"head_dim must be at least 1, not {head_dim}")
        return num_heads, head_dim

    def decoder_prefix(self, default_start: int) -> tuple[int, ...]:
        """The token ids between every source and its answer, from generation_config.json or, without that file, from
        config.json."""
        try:
            generation = Config.of_file(self.path.parent / "generation_config.json")
        except FileNotFoundError:
            generation = self
        start = generation.get("decoder_start_token_id", self.get("decoder_start_token_id", default_start))
        forced = generation.optional_int("forced_bos_token_id")
        prefix = (start,) if forced is None else (start, forced)
        vocab_size = self.require("vocab_size", int)
        if not all(0 <= token_id < vocab_size for token_id in prefix):
            raise self.refuse(f"decoder start tokens {prefix} are outside of the vocabulary of {vocab_size} tokens")
        return prefix

    def layer_types(
        self,
        default: list[str],
        known: tuple[str, ...] = ("full_attention", "sliding_attention", "chunked_attention"),
        key: str = "layer_types",
    ) -> list[str]:
        """Each layer's kind of attention, in the terms of transformers; with another key, of what that names."""
        types = self.values.get(key) or default
        if not isinstance(types, list) or len(types) != len(default) or any(name not in known for name in types):
            raise self.refuse(f"{key} must name {len(default)} layers, each one of {', '.join(known)}")
        return types
