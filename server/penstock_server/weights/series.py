"""Files that are numbered parts of one checkpoint, such as `model-00001-of-00003.safetensors`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock_server.errors import ConfigError

NUMBERED = re.compile(r".*-(\d{5})-of-(\d{5})\.\w+")


def series(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, completed to full series of numbered files."""
    required = set(names)
    for name in names:
        if match := NUMBERED.fullmatch(name):
            start, stop = match.span(1)
            total = int(match[2])
            if total <= len(names) * 1000:  # ignore absurd totals
                required |= {f"{name[:start]}{number:05}{name[stop:]}" for number in range(1, total + 1)}
    return tuple(sorted(required))


def check_complete(where: str, required: tuple[str, ...], names: Collection[str], why: str) -> None:
    """Raises ConfigError if a required file is not among the names."""
    missing = [name for name in required if name not in names]
    if missing:
        raise ConfigError(f"{where} lacks {len(missing)} of {len(required)} weight files that {why}, e.g. {missing[0]}")
