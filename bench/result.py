"""What all benchmarks share: their options, the heading of a result, and its files under bench/runs/."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "bench" / "runs"


def option_parser(description: str | None, num_repeats: int | None = None) -> argparse.ArgumentParser:
    """The options of every benchmark: `--out`, and `--repeats` if it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if num_repeats is not None:
        parser.add_argument("--repeats", type=int, default=num_repeats)
    parser.add_argument("--out", type=Path, default=RUNS)
    return parser


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


def title(record: Mapping[str, Any]) -> str:
    """The first paragraph of a report: when, where and how the benchmark ran."""
    machine = machine_of(record)
    return (
        f"{record['started']}, {machine['vendor']}, {machine['num_cores']} cores, `{record['command']}`, "
        f"{record['revision']}\n\n"
    )


def machine() -> dict[str, Any]:
    """CPU model, cores, memory and the relevant instruction sets."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(facts.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16")
    return {
        "cpu": f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family', '?')}, "
        f"model {facts.get('model', '?')})",
        "vendor": {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(facts.get("vendor_id", ""), platform.machine()),
        "num_cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in wanted if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
    }


def machine_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The machine of a result, which may be part of the machine's limits."""
    found: Mapping[str, Any] = record["machine"] if "machine" in record else record["limits"]["machine"]
    return found


def new_path(record: Mapping[str, Any], name: str, out: Path) -> Path:
    """The path of a new result: DATE-VENDOR-CORES-NAME.json, numbered if that exists."""
    out.mkdir(exist_ok=True)
    machine = machine_of(record)
    stem = f"{record['started'][:10]}-{machine['vendor']}-{machine['num_cores']}c-{name}"
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for number in numbers if not (path := out / f"{stem}{number}.json").exists())


def write(record: Mapping[str, Any], text: str, path: Path) -> None:
    """Writes the raw result, and its table next to it."""
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")  # every gap on a line of its own would be megabytes
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def keep(record: Mapping[str, Any], name: str, text: str, out: Path) -> Path:
    """Writes the raw result and its table, and prints the table. Returns the raw result's path."""
    path = new_path(record, name, out)
    write(record, text, path)
    print(f"\n{text}\nraw: {path}")
    return path
