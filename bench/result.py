"""Writes a benchmark's raw result and its table under bench/runs/."""

from __future__ import annotations

import datetime
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "bench" / "runs"


def from_root(command: Sequence[str]) -> str:
    """The command as typed in the project's folder."""
    return shlex.join(argument.removeprefix(f"{ROOT}/") for argument in command)


def revision() -> str:
    """The commit, with `-dirty` when the tree has uncommitted changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip() or "unknown"


def heading() -> dict[str, Any]:
    """The head of every result: command, start time and revision."""
    started = datetime.datetime.now(datetime.UTC)
    command = from_root([Path(sys.executable).name, *sys.argv])
    return {"command": command, "started": started.isoformat(timespec="seconds"), "revision": revision()}


def new_path(record: Mapping[str, Any], machine: Mapping[str, Any], name: str, out: Path) -> Path:
    """The path of a new result: DATE-VENDOR-CORES-NAME.json, numbered if that exists."""
    out.mkdir(exist_ok=True)
    stem = f"{record['started'][:10]}-{machine['vendor']}-{machine['num_cores']}c-{name}"
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for number in numbers if not (path := out / f"{stem}{number}.json").exists())


def keep(record: Mapping[str, Any], machine: Mapping[str, Any], name: str, text: str, out: Path) -> None:
    """Writes the raw result and its table, and prints the table."""
    path = new_path(record, machine, name, out)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nraw: {path}")
