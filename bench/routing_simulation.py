"""Simulates a million requests on 64 and on 1,000 replicas in virtual time: hit rate, also of one cache that knows the
future, TTFT, imbalance, and how much the router remembers. See router/src/replica/simulation.rs.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from figure import routing_simulation, table_of
from result import ROOT, heading, keep, machine, option_parser, title

COMMAND = ["cargo", "test", "--release", "--locked", "--quiet", "--package", "penstock-router", "--lib"]


def main() -> None:
    options = option_parser(__doc__).parse_args()
    record: dict[str, Any] = {**heading(), "machine": machine()}
    command = [*COMMAND, "replica::simulation", "--", "--ignored", "--nocapture", "--test-threads", "1"]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    # A line of a result may begin with the dot that reports the test before.
    lines = (line.lstrip(".") for line in run.stdout.splitlines())
    record["runs"] = [json.loads(line) for line in lines if line.startswith("{")]
    keep(record, "routing-simulation", title(record) + table_of(routing_simulation(record)), options.out)


if __name__ == "__main__":
    main()
