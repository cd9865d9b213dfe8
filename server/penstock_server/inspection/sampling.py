"""The sampling defaults of a model folder. Imports no torch.

The server's own rules are in `router/src/generation/sampling_default.rs`; a test compares both."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_Rule = tuple[str, Callable[[float], bool]]

_FRACTION: _Rule = ("a number from 0 to 1", lambda value: 0 <= value <= 1)
_RULES: dict[str, _Rule] = {
    "temperature": ("a number of at least 0", lambda value: value >= 0),
    "top_p": _FRACTION,
    "top_k": ("an integer of at least -1", lambda value: value >= -1 and value == int(value)),
    "min_p": _FRACTION,
    "typical_p": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "repetition_penalty": ("a number above 0", lambda value: value > 0),
    "max_new_tokens": ("an integer of at least 1", lambda value: value >= 1 and value == int(value)),
}
_LARGEST = {"top_k": 2**31 - 1, "max_new_tokens": 2**32 - 1}
"""Limits of integers: larger values mean these."""
# Each with the number that has no effect in transformers either.
_NOT_APPLIED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
    "early_stopping": 0,
    "penalty_alpha": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": 0,
    "guidance_scale": 1,
    "renormalize_logits": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_length": 0,
    "max_time": 0,
    "stop_strings": 0,
    "suppress_tokens": 0,
    "begin_suppress_tokens": 0,
    "bad_words_ids": 0,
    "force_words_ids": 0,
    "constraints": 0,
    "sequence_bias": 0,
    "forced_decoder_ids": 0,
    "forced_eos_token_id": 0,
    "token_healing": 0,
    "watermarking_config": 0,
    "dola_layers": 0,
    # Unknown to transformers; some authors write them.
    "presence_penalty": 0,
    "frequency_penalty": 0,
    # Known from GGUF files only.
    "xtc_probability": 0,
    "mirostat": 0,
}
_MAX_CHARS = 40


def inspect_sampling(folder: Path, notes: list[str]) -> dict[str, float]:
    """What requests on the routes of OpenAI and Anthropic leave out. Appends to `notes` what has no effect."""
    name, config = _entries(folder)
    defaults, bad = sampling_defaults(config)
    notes += [f"{name}: {problem}; it is ignored" for problem in bad]
    if names := not_applied(config):
        notes.append(f"{name}: no effect here, but in transformers: {', '.join(names)}")
    return defaults


def sampling_defaults(config: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The defaults, and what is wrong with other values, each as `name is value, must be …`."""
    defaults: dict[str, float] = {}
    bad = []
    for key, (expected, is_allowed) in _RULES.items():
        value = config.get(key)
        if value is None:
            continue
        number = _number(value, is_integer=key in _LARGEST)
        if not math.isfinite(number) or not is_allowed(number):
            bad.append(f"{key} is {_shortened(value)}, must be {expected}")
        else:
            defaults[key] = min(int(value), _LARGEST[key]) if key in _LARGEST else value
    return defaults, bad


def not_applied(config: Mapping[str, Any]) -> list[str]:
    """The entries that transformers would apply and the server does not, as `name value`."""
    greedy = ["do_sample false"] if config.get("do_sample") is False else []
    given = [(key, config.get(key), neutral) for key, neutral in _NOT_APPLIED.items()]
    return greedy + [
        f"{key} {_shortened(value)}" for key, value, neutral in given if value and (value is True or value != neutral)
    ]


def described(defaults: Mapping[str, float]) -> str:
    """The defaults for people."""
    return ", ".join(f"{key} {value}" for key, value in defaults.items())


def _entries(folder: Path) -> tuple[str, dict[str, Any]]:
    """Entries of the file; without the file, entries of the model's configuration, as in transformers."""
    path = folder / "generation_config.json"
    if path.exists():
        return path.name, _read(path)
    config = {key: value for key, value in _read(folder / "config.json").items() if value is not None}
    text = config.get("text_config")
    return "config.json", {**text, **config} if isinstance(text, dict) else config


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any, *, is_integer: bool) -> float:
    """As the server's 32-bit float; not finite if it is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        number = math.inf
    return value if is_integer and isinstance(value, int) else number


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{text[:_MAX_CHARS]}…" if len(text) > _MAX_CHARS else text
