"""Settings of the launcher as keyword arguments: `max_batch_size=8` is `--max-batch-size=8`.

The binary itself lists the flags and checks the values, so a new flag is known here at once.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import SettingError, StartError

_PRIVATE = "the server listens on a private unix socket; run `penstock` for a server that others can use"
_RESERVED = {
    "model_id": "give the model as the first argument",
    "uds": _PRIVATE,
    "port": _PRIVATE,
    "hostname": _PRIVATE,
    "api_key": _PRIVATE,
    "api_key_file": _PRIVATE,
    "stop_with_stdin": "the server always stops with this process",
    "json_output": "the log goes to Python's logging, as `penstock.server`",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the launcher. A switch takes no value."""

    name: str
    variable: str | None
    is_switch: bool


@cache
def flags(binary: Path) -> Mapping[str, Flag]:
    """All flags of a binary by the names of their settings."""
    command = [str(binary), "--reference", "settings"]
    try:
        page = subprocess.run(command, capture_output=True, check=True, text=True).stdout  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartError(f"cannot run {binary}: {getattr(error, 'stderr', None) or error}") from error
    listed = (Flag(flag["name"], flag["variable"], flag["switch"]) for flag in json.loads(page))
    return {flag.name.replace("-", "_"): flag for flag in listed}


def command_line(binary: Path, settings: Mapping[str, Any]) -> list[str]:
    """The launcher's arguments for settings. Raises SettingError for an unknown one; the binary checks the values."""
    known = flags(binary)
    arguments = []
    for name, value in settings.items():
        if name in _RESERVED:
            raise SettingError(f"{name} is not a setting of LLM: {_RESERVED[name]}")
        if name not in known:
            raise SettingError(_unknown(name, known))
        flag = known[name]
        if value is None:
            continue
        if not flag.is_switch:
            arguments.append(f"--{flag.name}={_text(value)}")
        elif not isinstance(value, bool):
            raise SettingError(f"{name} is {value!r}, must be True or False")
        elif value:
            arguments.append(f"--{flag.name}")
    return arguments


def switched_off(binary: Path, settings: Mapping[str, Any]) -> set[str]:
    """The environment variables that would turn on a switch which the settings turn off."""
    return {
        variable for name, value in settings.items() if value is False and (variable := flags(binary)[name].variable)
    }


def _unknown(name: str, known: Mapping[str, Flag]) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known.keys() - _RESERVED.keys(), n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "docs/flags.md lists all settings"
    return f"unknown setting {name}; {hint}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, (list, tuple)):
        return ",".join(_text(part) for part in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
