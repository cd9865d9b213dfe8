"""Writes docs/models.md from what the parity tests measured: `pytest server/tests/architecture --models-table PATH`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cases import CASES

SAME_BITS = "same bits"
COLUMNS = ("float32", "bfloat16", "greedy", SAME_BITS, "2 ranks", "3 ranks", "4 ranks")
HEAD = """# Models

Every architecture that Penstock serves, by the `model_type` of a model's `config.json`, and how the last run of its
tests came out. [How to add one](adding-a-model.md).

This page is written by `make docs` from a run of `server/tests/architecture`. For each architecture tiny models with
random weights are made, several where layouts differ by size, and compared with `transformers`:

- **float32**: logits of a batch that mixes chunks of prompts with single tokens, within 1e-4; the largest difference.
- **bfloat16**: logits within 2e-2 of their scale; the root mean square of the differences, divided by the logits'.
- **greedy**: 64 tokens of three sequences, equal to those of `transformers`, with chunks of prompts, a shared prefix
  (answers to sources share none) and a preemption; the number of tokens compared.
- **same bits**: in bfloat16 on native kernels every token's logits are the same, to the bit, however its prompt is cut
  and whatever is beside it.
- **2, 3, 4 ranks**: logits on so many ranks within 1e-4 of those on one (which the columns before are about), and the
  same tokens; the largest difference. KV heads are copied where there are fewer than ranks, heads are dealt out
  unevenly where ranks do not divide them, experts are dealt out whole, or cut where there are fewer than ranks; and the
  ranks' memory is what that arithmetic says.

"""
SWEEP_HEADING = "## Other models of transformers"
SWEEP = """
Every other causal model of the installed `transformers` is tried too, one tiny model with random weights each, made of
its default configuration with small sizes: over our attention and cache on one rank, in chunks, beside others, over a
shared prefix and through a preemption, it must give the tokens of `transformers`, or be refused with a reason before
the server is ready. A published model whose configuration differs from the default may be refused all the same: each is
tried at load. *not tried*: `transformers` does not make such a model of a configuration that was made automatically.

"""


@dataclass
class Row:
    """What was measured for one architecture, the worst of its cases."""

    cases: list[str] = field(default_factory=list)
    passed: dict[str, list[bool]] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def cell(self, column: str) -> str:
        outcomes = self.passed.get(column, [])
        if not outcomes:
            return "not run"
        if not all(outcomes):
            return "✗"
        if column == SAME_BITS:
            return "✓"
        return f"✓ {self.tokens}" if column == "greedy" else f"✓ {self.worst[column]:.1e}"


class Measured:
    """Collects, test by test, and writes the page."""

    @cached_property
    def rows(self) -> dict[str, Row]:
        rows = {case.model_type: Row() for case in CASES.values()}
        for name, case in CASES.items():
            rows[case.model_type].cases.append(name)
        return rows

    def difference(self, case: str, column: str, value: float) -> None:
        worst = self.rows[CASES[case].model_type].worst
        worst[column] = max(value, worst.get(column, 0.0))

    def tokens(self, case: str, count: int) -> None:
        self.rows[CASES[case].model_type].tokens += count

    def outcome(self, case: str, column: str, passed: bool) -> None:
        self.rows[CASES[case].model_type].passed.setdefault(column, []).append(passed)

    @cached_property
    def others(self) -> dict[str, str]:
        """What became of model types that have no decoder of ours."""
        return {}

    def other(self, model_type: str, outcome: str) -> None:
        self.others[model_type] = outcome

    def write(self, path: Path) -> None:
        lines = [f"| model type | tiny models | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
        for model_type, row in sorted(self.rows.items()):
            cells = " | ".join(row.cell(column) for column in COLUMNS)
            lines.append(f"| `{model_type}` | {', '.join(row.cases)} | {cells} |")
        others = ["| model type | |", "|---|---|"]
        for model_type, outcome in sorted(self.others.items()):
            said = re.sub(r" \(\w+(, \w+){9,}\)", "", outcome).removeprefix(f"model type {model_type!r} ")
            others.append(f"| `{model_type}` | {'✓ served' if outcome == 'served' else said.replace('|', ' ')} |")
        table, other_table = "\n".join(lines), "\n".join(others)
        path.write_text(f"{HEAD}{table}\n\n{SWEEP_HEADING}\n{SWEEP}{other_table}\n", encoding="utf-8")
