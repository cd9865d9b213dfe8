"""What all benchmarks share: their options, the heading of a result, and its files under bench/runs/."""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "bench" / "runs"
SUFFIX = ".json.gz"  # raw results are compressed: repeats of events are large, and compress to a seventh
MAX_BUSY_SHARE = 0.1  # share of the processors that may be busy when a benchmark begins
BUSY_WINDOW_S = 2.0


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


def busy_share() -> float:
    """The share of all processors that other programs, and the host's other guests, use now."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            numbers = [int(number) for number in file.readline().split()[1:9]]
        return sum(numbers), sum(numbers) - numbers[3] - numbers[4]  # all; neither idle nor waiting for a disk

    before = ticks()
    time.sleep(BUSY_WINDOW_S)
    total, busy = (after - start for after, start in zip(ticks(), before, strict=True))
    return busy / max(total, 1)


def heading() -> dict[str, Any]:
    """The head of every result: command, start time, revision, and how busy the machine was before."""
    busy = busy_share()
    if busy > MAX_BUSY_SHARE:
        print(
            f"warning: other programs use {busy:.0%} of the processors; this result cannot be quoted", file=sys.stderr
        )
    started = datetime.datetime.now(datetime.UTC)
    command = from_root([Path(sys.executable).name, *sys.argv])
    return {
        "command": command,
        "started": started.isoformat(timespec="seconds"),
        "revision": revision(),
        "busy_share": busy,
    }


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
    """The path of a new result: DATE-VENDOR-CORES-NAME.json.gz, numbered if that exists."""
    out.mkdir(exist_ok=True)
    machine = machine_of(record)
    stem = f"{record['started'][:10]}-{machine['vendor']}-{machine['num_cores']}c-{name}"
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for number in numbers if not (path := out / f"{stem}{number}{SUFFIX}").exists())


def write(record: Mapping[str, Any], text: str, path: Path) -> None:
    """Writes the raw result, and its table next to it."""
    save(record, path)
    beside(path, ".md").write_text(text, encoding="utf-8")


def save(record: Mapping[str, Any], path: Path) -> None:
    """Writes the raw result; a file under its name is always complete."""
    unfinished = beside(path, ".unfinished")
    unfinished.write_bytes(gzip.compress(json.dumps(record).encode(), mtime=0))
    unfinished.rename(path)


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return record


def beside(path: Path, suffix: str) -> Path:
    """The file of a raw result's table or plot."""
    return path.with_name(path.name.removesuffix(SUFFIX) + suffix)


def keep(record: Mapping[str, Any], name: str, text: str, out: Path) -> Path:
    """Writes the raw result and its table, and prints the table. Returns the raw result's path."""
    path = new_path(record, name, out)
    write(record, text, path)
    print(f"\n{text}\nraw: {path}")
    return path
