"""Writes the documentation's figures from the raw results under bench/runs/; with `--check` refuses stale pages.

A raw result may be quoted when its revision is clean and in the history and each figure has at least three repeats.
The newest such result of each benchmark is quoted, with all of its columns. The text between `<!-- figures: NAME -->`
and `<!-- end of figures -->` belongs to this program.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import plot
from figure import BENCHMARKS, Figure, Record, table_of
from prediction import decode_name, kernel_table, prompt_name, sources, step_table
from result import MAX_BUSY_SHARE, ROOT, RUNS, SUFFIX, machine_of, read
from table import BASE, best_limits, floors, markdown, medians

PAGES = ("README.md", "docs/figures.md")
PLOT = "docs/images/compare.svg"
MIN_REPEATS = 3
VERSUS = ", speed to the best peer"
PREDICTED_MODEL, PREDICTED_LOADS = "llama-8b", (decode_name(1), decode_name(256), prompt_name(4096))
BLOCK = re.compile(r"(?P<open><!-- figures: (?P<name>[a-z-]+) -->\n).*?(?P<close><!-- end of figures -->)", re.DOTALL)
FILE_NAME = re.compile(r"\d{4}-\d\d-\d\d-[a-z]+-\d+c-(?P<benchmark>[a-z][a-z0-9-]*?)(-\d+)?\.json\.gz")
# A result is old when more lines than this of the code that it measures have changed since.
OLD_LINES = 5000
ALL_CODE = ("server/penstock_server", "kernels/src", "router/src", "scheduler/src", "launcher/src", "proto")
ROUTER_CODE = ("router/src", "scheduler/src", "proto")
MEASURED = {
    "scheduler": ("scheduler/src",),
    "simulation": ("scheduler/src",),
    "routing-simulation": ("router/src/replica",),
} | (dict.fromkeys(("router", "many-streams", "routing", "chaos-replicas"), ROUTER_CODE))


class FigureError(Exception):
    """A page quotes something that may not be quoted."""


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@functools.cache
def in_history(revision: str) -> bool:
    """Whether the commit is an ancestor of this tree's; a shallow clone cannot tell and is taken at its word."""
    return is_shallow() or git("merge-base", "--is-ancestor", revision, "HEAD").returncode == 0


def is_shallow() -> bool:
    """Whether this clone lacks a part of the history."""
    return git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"


@functools.cache
def is_old(revision: str, benchmark: str) -> bool:
    """Whether much of what a benchmark measures has changed since; a shallow clone cannot tell and says no."""
    if is_shallow():
        return False
    code = MEASURED.get(benchmark, ALL_CODE)
    changed = git("diff", "--shortstat", "--find-renames", revision, "HEAD", "--", *code, ":!*test*").stdout
    return sum(int(number) for number in re.findall(r"(\d+) (?:insertion|deletion)", changed)) > OLD_LINES


def refusal(record: Record, quoted: Sequence[Figure]) -> str | None:
    """Why a raw result may not be quoted."""
    revision = record["revision"]
    if revision.endswith("-dirty") or not in_history(revision):
        return f"its revision {revision} is not a clean commit of the history"
    if (busy := record.get("busy_share", 0.0)) > MAX_BUSY_SHARE:
        return f"other programs used {busy:.0%} of the processors when it began"
    for figure in quoted:
        if not figure.is_count and figure.num_repeats < MIN_REPEATS:
            return f'"{figure.name}" has {figure.num_repeats} repeats, at least {MIN_REPEATS} are needed'
    return None


@dataclass(frozen=True, slots=True)
class Quoted:
    """A raw result that may be quoted, and its figures."""

    benchmark: str
    path: Path
    record: Record
    rows: Sequence[Figure]

    @property
    def machine(self) -> str:
        """The kind of machine."""
        machine = machine_of(self.record)
        return f"{machine['cpu']}, {machine['num_cores']} cores"

    def source(self) -> str:
        """Machine, revision, command and a link, for below a table."""
        age = "; **old**: much of the measured code has changed since" if self.is_old else ""
        return (
            f"{self.machine}; revision {self.record['revision'][:12]}, {self.record['started'][:10]}{age}; "
            f"`{self.record['command']}`; raw result: [{self.path.name}]({{up}}bench/runs/{self.path.name})."
        )

    @property
    def is_old(self) -> bool:
        return is_old(self.record["revision"], self.benchmark)


def quotable(benchmark: str, refused: dict[Path, str], runs: Path = RUNS) -> list[Quoted]:
    """The newest raw result of a benchmark that may be quoted, of each kind of machine, the newest first; adds those
    that may not be quoted to `refused`."""
    results = []
    for path in runs.glob(f"*{SUFFIX}"):
        found = FILE_NAME.fullmatch(path.name)
        if found and found["benchmark"] == benchmark:
            results.append((path, read(path)))
    by_machine: dict[str, Quoted] = {}
    for path, record in sorted(results, key=lambda result: result[1]["started"], reverse=True):
        rows = [figure for figure in BENCHMARKS[benchmark](record) if figure.values]
        if reason := refusal(record, rows) or ("" if rows else "it has no figures"):
            refused[path] = reason
            continue
        quoted = Quoted(benchmark, path, record, rows)
        by_machine.setdefault(quoted.machine, quoted)
    return list(by_machine.values())


def machines_table(results: Sequence[Quoted]) -> str:
    """README's first table: on each kind of machine, Penstock's speed to the best peer's, with the range of the
    repeats."""
    columns = [row.name for row in results[0].rows if row.name.endswith(VERSUS)]
    rows = []
    for quoted in results:
        figures = {row.name: row.row() for row in quoted.rows}
        cells = [f"{figures[name][2]} ({figures[name][3]})" for name in columns]
        rows.append([f"{quoted.machine}{', old' if quoted.is_old else ''}", *cells])
    names = [name.removeprefix("penstock: ").removesuffix(VERSUS) for name in columns]
    head = "Speed relative to the best other server, on each kind of machine; medians and ranges of the repeats:"
    return f"{head}\n\n{markdown(['', *names], rows)}"


def headline(quoted: Quoted) -> str:
    """README's second table: every server on the machine measured last, speed relative to the peer."""
    by_server = medians(quoted.record)
    floor = floors(best_limits(quoted.record), quoted.record["model"], quoted.record["load"])

    def cells(row: dict[str, float], base: dict[str, float]) -> list[str]:
        return [f"{base[c] / row[c] if c.startswith('ttft') else row[c] / base[c]:.2f}" for c in floor]

    names = [f"time to first token, {c.removeprefix('ttft ')} tokens" if c.startswith("ttft") else c for c in floor]
    rows = [[name, *cells(row, by_server[BASE])] for name, row in by_server.items()]
    rows.append(["Penstock's share of the machine's limit", *cells(by_server["penstock"], floor)])
    repeats = len(quoted.record["repeats"])
    where = f"Every server on {quoted.machine}, relative to {BASE}"
    head = f"{where} (above 1 is faster), medians of {repeats} repeats:\n\n"
    image = f"![Throughput and latencies over the number of streams]({PLOT})"
    return f"{head}{markdown(['', *names], rows)}\n{image}\n\n{quoted.source().format(up='')}\n"


def missed_targets(by_benchmark: dict[str, list[Quoted]]) -> str:
    """Every figure of a newest result that misses its target."""
    newest = [(benchmark, results[0]) for benchmark, results in by_benchmark.items() if results]
    rows = [
        [section(benchmark), row.name, row.target, row.row()[2]]
        for benchmark, quoted in newest
        for row in quoted.rows
        if row.is_missed
    ]
    return f"## Missed targets\n\n{markdown(['section', 'figure', 'target', 'median'], rows)}"


def section(benchmark: str) -> str:
    return benchmark.replace("-", " ").capitalize()


def all_figures(by_benchmark: dict[str, list[Quoted]]) -> str:
    """The missed targets, then every figure, one section a benchmark; the comparison of each kind of machine."""
    parts = [missed_targets(by_benchmark)]
    for benchmark, results in by_benchmark.items():
        parts.append(f"## {section(benchmark)}\n")
        if not results:
            parts.append("Not measured yet with three repeats of a clean revision.\n")
        for quoted in results if benchmark == "compare" else results[:1]:
            parts += [table_of(quoted.rows), quoted.source().format(up="../") + "\n"]
    return "\n".join(parts)


@functools.cache
def prediction(runs: Path = RUNS) -> str | None:
    """The tables of the newest prediction of a clean revision; None: there is none. It counts, so one run is enough."""
    records = [(read(path), path) for path in runs.glob(f"*-predict*{SUFFIX}")]
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


def unquoted(pages: Iterable[str], runs: Path = RUNS) -> list[str]:
    """Files under `runs` whose raw result no page links to."""
    text = "\n".join(pages)
    return sorted(path.name for path in runs.iterdir() if f"{path.name.split('.')[0]}{SUFFIX}" not in text)


def rendered(page: str, by_benchmark: dict[str, list[Quoted]]) -> str:
    """The page's text with every marked block written anew. Raises FigureError for a block that cannot be written."""

    def block(found: re.Match[str]) -> str:
        if found["name"] == "all":
            text = all_figures(by_benchmark)
        elif found["name"] == "predicted" and (tables := prediction()):
            text = tables
        elif found["name"] == "compare" and (results := by_benchmark["compare"]):
            text = f"{machines_table(results)}\n{headline(results[0])}"
        else:
            raise FigureError(f'no raw result may be quoted for "{found["name"]}"')
        text = re.sub(r"\b1 streams([^|\n]*)", r"1 stream\1 ", text)
        return f"{found['open']}\n{text}\n{found['close']}"

    return BLOCK.sub(block, page)


def comparable(content: bytes) -> bytes:
    """A page's content; a shallow clone, which cannot tell the age of results, ignores their marks."""
    return re.sub(rb"; \*\*old\*\*: [^;]*|, old(?= +\|)", b"", content) if is_shallow() else content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is stale")
    options = parser.parse_args()
    refused: dict[Path, str] = {}
    by_benchmark = {benchmark: quotable(benchmark, refused) for benchmark in BENCHMARKS}
    after = {}
    for name in PAGES:
        try:
            after[name] = rendered((ROOT / name).read_text(encoding="utf-8"), by_benchmark).encode()
        except FigureError as error:
            sys.exit(f"error: {name}: {error}")
    if compared := by_benchmark["compare"]:
        after[PLOT] = plot.comparison(compared[0].record)
    stale = []
    for name, content in after.items():
        path = ROOT / name
        if path.exists() and comparable(path.read_bytes()) == comparable(content):
            continue
        if options.check:
            stale.append(name)
        else:
            path.write_bytes(content)
            print(f"wrote {name}")
    if not options.check:
        for path, reason in refused.items():
            print(f"not quoted: {path.name}: {reason}")
    others = (path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md"))
    if left := unquoted([*(content.decode() for content in after.values()), *others]):
        sys.exit(f"error: no page quotes these files under bench/runs; delete them: {', '.join(left)}")
    if stale:
        sys.exit(f"error: figures are stale in {', '.join(stale)}; run `make docs`")


if __name__ == "__main__":
    main()
