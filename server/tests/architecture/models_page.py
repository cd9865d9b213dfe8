"""Writes docs/models.md from the results of the parity tests: `pytest server/tests/architecture --models-table
PATH`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cases import CASES
from transformers import CONFIG_MAPPING

SAME_BITS = "same bits"
COLUMNS = ("float32", "bfloat16", "greedy", SAME_BITS, "2 ranks", "3 ranks", "4 ranks")
HEAD = """# Models

The architectures that Penstock serves natively, by `model_type` of the model's `config.json`, with the results of the
last test run. Other models of `transformers` are listed at the end of the page. [How to add one](adding-a-model.md).

`make docs` writes this page from a run of `server/tests/architecture`. For each architecture, the tests make tiny
models with random weights, several if layouts differ by size, and compare them with `transformers`:

- **float32**: the largest difference of logits, in batches that mix prompt chunks and single tokens. At most 1e-4.
- **bfloat16**: the root mean square of the differences of logits, relative to that of the logits. At most 2e-2. In
  mixtures of experts, rounding decides between experts with almost equal scores. There, the reference is made to follow
  our choice, in at most a tenth of the rows, so these rows are not independent of our routing.
- **greedy**: the number of compared tokens: 64 for each of three sequences, with chunked prefill, a preemption, and a
  shared prefix (except with encoders). All are equal.
- **same bits**: in bfloat16 on native kernels, each token's logits are the same to the bit, however its prompt is cut
  into chunks and whatever else is in the batch.
- **2, 3, 4 ranks**: the largest difference of logits between this many ranks and one rank. At most 1e-4, with the same
  greedy tokens. The memory of the ranks is also compared with the expected one: KV heads are replicated if there are
  fewer than ranks, heads are distributed unevenly if ranks do not divide them, and experts are whole if there are
  enough.

`transformers` has no classes for {published}.
Their reference is a model that computes the same, saved in the layout in which such models are published.

"""
SWEEP_HEADING = "## Other models of transformers"
SWEEP = """
All other causal models of the installed `transformers` run on its modules, on one rank, with our attention and cache,
if they fit. {served} of {total} do, each tried as one tiny model with random weights whose configuration is the default
with small sizes. A served model generates the tokens of `transformers` in chunks and batches, with a shared prefix and
a preemption. Any other model is refused at load with a reason. A published model may be refused although its type is
served here, because its configuration differs from the default. *not tried*: no tiny model could be made automatically.

"""


@dataclass
class Row:
    """The results of one architecture: the worst of its cases."""

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
    """Collects the results of the tests and writes the page."""

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
        """The outcome of model types without a native decoder."""
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
        published = sorted(f"`{model_type}`" for model_type in self.rows if model_type not in CONFIG_MAPPING)
        head = HEAD.replace("{published}", ", ".join(published))
        num_served = sum(outcome == "served" for outcome in self.others.values())
        sweep = SWEEP.format(served=num_served, total=len(self.others))
        tables = "\n".join(lines), "\n".join(others)
        path.write_text(f"{head}{tables[0]}\n\n{SWEEP_HEADING}\n{sweep}{tables[1]}\n", encoding="utf-8")
