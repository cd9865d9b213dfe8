"""Writes the documentation's figures from the raw results under bench/runs/; with `--check` refuses stale pages.

A raw result may be quoted when its revision is clean and in the history and each figure has at least three repeats.
The newest such result of each benchmark is quoted, with all of its columns. The text between `<!-- figures: NAME -->`
and `<!-- end of figures -->` belongs to this program.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plot
from figure import BENCHMARKS, Figure, Record, table_of
from prediction import decode_name, kernel_table, prompt_name, sources, step_table
from result import ROOT, RUNS
from table import BASE, floors, markdown, medians

PAGES = ("README.md", "docs/figures.md")
PLOT = "docs/images/compare.svg"
MIN_REPEATS = 3
PREDICTED_MODEL, PREDICTED_LOADS = "llama-8b", (decode_name(1), decode_name(256), prompt_name(4096))
BLOCK = re.compile(r"(?P<open><!-- figures: (?P<name>[a-z-]+) -->\n).*?(?P<close><!-- end of figures -->)", re.DOTALL)
FILE_NAME = re.compile(r"\d{4}-\d\d-\d\d-[a-z]+-\d+c-(?P<benchmark>[a-z][a-z0-9-]*?)(-\d+)?\.json")


class FigureError(Exception):
    """A page quotes something that may not be quoted."""


@functools.cache
def in_history(revision: str) -> bool:
    """Whether the commit is an ancestor of this tree's; a shallow clone cannot tell and is taken at its word."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return True
    return git("merge-base", "--is-ancestor", revision, "HEAD").returncode == 0


def refusal(record: Record, quoted: Sequence[Figure]) -> str | None:
    """Why a raw result may not be quoted."""
    revision = record["revision"]
    if revision.endswith("-dirty") or not in_history(revision):
        return f"its revision {revision} is not a clean commit of the history"
    for figure in quoted:
        if not figure.is_count and figure.num_repeats < MIN_REPEATS:
            return f'"{figure.name}" has {figure.num_repeats} repeats, at least {MIN_REPEATS} are needed'
    return None


@dataclass(frozen=True, slots=True)
class Quoted:
    """A raw result that may be quoted, and its figures."""

    path: Path
    record: Record
    rows: Sequence[Figure]

    def source(self) -> str:
        """Machine, revision, command and a link, for below a table."""
        machine = self.record.get("machine") or self.record["limits"]["machine"]
        link = f"bench/runs/{self.path.name}"
        return (
            f"{machine['cpu']}, {machine['num_cores']} cores; revision {self.record['revision'][:12]}, "
            f"{self.record['started'][:10]}; `{self.record['command']}`; raw result: [{self.path.name}]({{up}}{link})."
        )


def newest(benchmark: str, refused: dict[Path, str], runs: Path = RUNS) -> Quoted | None:
    """The newest raw result of a benchmark that may be quoted; adds newer ones that may not to `refused`."""
    results = []
    for path in runs.glob("*.json"):
        found = FILE_NAME.fullmatch(path.name)
        if found and found["benchmark"] == benchmark:
            results.append((path, json.loads(path.read_text(encoding="utf-8"))))
    for path, record in sorted(results, key=lambda result: result[1]["started"], reverse=True):
        rows = [figure for figure in BENCHMARKS[benchmark](record) if figure.values]
        reason = refusal(record, rows)
        if reason is None and rows:
            return Quoted(path, record, rows)
        refused[path] = reason or "it has no figures"
    return None


def headline(quoted: Quoted) -> str:
    """README's table: every column of the comparison, speed relative to the peer."""
    by_server = medians(quoted.record)
    floor = floors(quoted.record["limits"], quoted.record["model"], quoted.record["load"])

    def cells(row: dict[str, float], base: dict[str, float]) -> list[str]:
        return [f"{base[c] / row[c] if c.startswith('ttft') else row[c] / base[c]:.2f}" for c in floor]

    names = [f"time to first token, {c.removeprefix('ttft ')} tokens" if c.startswith("ttft") else c for c in floor]
    rows = [[name, *cells(row, by_server[BASE])] for name, row in by_server.items()]
    rows.append(["Penstock's share of the machine's limit", *cells(by_server["penstock"], floor)])
    repeats = len(quoted.record["repeats"])
    head = f"Speed relative to {BASE} (above 1 is faster), medians of {repeats} repeats:\n\n"
    image = f"![Throughput and latencies over the number of streams]({PLOT})"
    return f"{head}{markdown(['', *names], rows)}\n{image}\n\n{quoted.source().format(up='')}\n"


def all_figures(by_benchmark: dict[str, Quoted | None]) -> str:
    """Every figure, one section a benchmark."""
    parts = []
    for benchmark, quoted in by_benchmark.items():
        parts.append(f"## {benchmark.replace('-', ' ').capitalize()}\n")
        if quoted is None:
            parts.append("Not measured yet with three repeats of a clean revision.\n")
            continue
        parts += [table_of(quoted.rows), quoted.source().format(up="../") + "\n"]
    return "\n".join(parts)


@functools.cache
def prediction(runs: Path = RUNS) -> str | None:
    """The tables of the newest prediction of a clean revision; None: there is none. It counts, so one run is enough."""
    records = [(json.loads(path.read_text(encoding="utf-8")), path) for path in runs.glob("*-predict*.json")]
    for record, path in sorted(records, key=lambda found: found[0]["started"], reverse=True):
        if refusal(record, ()) is None:
            kernels = {name: record["models"][PREDICTED_MODEL][name] for name in PREDICTED_LOADS}
            source = (
                f"Revision {record['revision'][:12]}, {record['started'][:10]}; `{record['command']}`; raw result, "
                f"with the kernels of all models and loads: [{path.name}](../bench/runs/{path.name})."
            )
            head = f"The kernels of {PREDICTED_MODEL}, of all layers together:\n"
            return "\n".join([step_table(record), sources(), head, kernel_table(kernels), source, ""])
    return None


def rendered(page: str, by_benchmark: dict[str, Quoted | None]) -> str:
    """The page's text with every marked block written anew. Raises FigureError for a block that cannot be written."""

    def block(found: re.Match[str]) -> str:
        if found["name"] == "all":
            text = all_figures(by_benchmark)
        elif found["name"] == "predicted" and (tables := prediction()):
            text = tables
        elif found["name"] == "compare" and (quoted := by_benchmark["compare"]):
            text = headline(quoted)
        else:
            raise FigureError(f'no raw result may be quoted for "{found["name"]}"')
        text = re.sub(r"\b1 streams([^|\n]*)", r"1 stream\1 ", text)
        return f"{found['open']}\n{text}\n{found['close']}"

    return BLOCK.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is stale")
    options = parser.parse_args()
    refused: dict[Path, str] = {}
    by_benchmark = {benchmark: newest(benchmark, refused) for benchmark in BENCHMARKS}
    after = {}
    for name in PAGES:
        try:
            after[name] = rendered((ROOT / name).read_text(encoding="utf-8"), by_benchmark).encode()
        except FigureError as error:
            sys.exit(f"error: {name}: {error}")
    if quoted := by_benchmark["compare"]:
        after[PLOT] = plot.comparison(quoted.record)
    stale = []
    for name, content in after.items():
        path = ROOT / name
        if path.exists() and path.read_bytes() == content:
            continue
        if options.check:
            stale.append(name)
        else:
            path.write_bytes(content)
            print(f"wrote {name}")
    if not options.check:
        for path, reason in refused.items():
            print(f"not quoted: {path.name}: {reason}")
    if stale:
        sys.exit(f"error: figures are stale in {', '.join(stale)}; run `make docs`")


if __name__ == "__main__":
    main()
