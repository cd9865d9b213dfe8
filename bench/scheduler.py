"""Measures the scheduler alone: planning a step and applying its result, or with `--simulate` a long simulation.

The simulation runs in virtual time and fails at the first broken invariant; its result is what the run has met.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from result import ROOT, heading, keep, machine, title
from table import markdown

PACKAGE = ["--locked", "--package", "penstock-scheduler"]
COUNT = re.compile(r" +(\d+)  (.+)")


def plan_and_apply() -> dict[str, Any]:
    """Criterion's estimates of a step, in microseconds, by benchmark."""
    started, steps = time.time(), {}
    subprocess.run(["cargo", "bench", *PACKAGE, "--bench", "step"], cwd=ROOT, check=True)
    for path in sorted((ROOT / "target" / "criterion").glob("*/*/new/estimates.json")):
        if path.stat().st_mtime >= started:
            estimates = json.loads(path.read_text(encoding="utf-8"))
            interval = estimates["median"]["confidence_interval"]
            steps["/".join(path.parts[-4:-2])] = {
                "median_us": estimates["median"]["point_estimate"] / 1000,
                "median_95_us": [interval["lower_bound"] / 1000, interval["upper_bound"] / 1000],
                "mean_us": estimates["mean"]["point_estimate"] / 1000,
            }
    return steps


def simulate(steps: int, seed: int) -> dict[str, int]:
    """What a simulation of this many steps has met. Raises CalledProcessError when an invariant broke."""
    command = ["cargo", "test", "--quiet", *PACKAGE, "--test", "simulation", "every_guarantee", "--", "--nocapture"]
    environment = {**os.environ, "SIMULATION_SEED": str(seed), "SIMULATION_STEPS": str(steps)}
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return {found[2]: int(found[1]) for line in run.stdout.splitlines() if (found := COUNT.fullmatch(line))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation's first scenario")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("runs"))
    options = parser.parse_args()
    record: dict[str, Any] = {**heading(), "machine": machine()}
    if options.simulate:
        record["counts"] = simulate(options.simulate, options.seed)
        table = markdown(["met", "times"], [[name, f"{count:,}"] for name, count in record["counts"].items()])
        keep(record, "simulation", title(record) + table, options.out)
        return
    record["plan_and_apply_per_step"] = plan_and_apply()
    rows = [[name, f"{step['median_us']:.2f}"] for name, step in record["plan_and_apply_per_step"].items()]
    keep(record, "scheduler", title(record) + markdown(["load", "median µs"], rows), options.out)


if __name__ == "__main__":
    main()
