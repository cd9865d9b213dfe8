"""Run the scheduler's benchmarks and write their estimates to bench/runs/, with command, revision and machine."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from limits import machine  # noqa: E402

COMMAND = ["cargo", "bench", "--locked", "--package", "penstock-scheduler", "--bench", "step"]


def main() -> None:
    facts = machine()
    started = datetime.datetime.now(datetime.UTC)
    subprocess.run(COMMAND, cwd=ROOT, check=True)  # noqa: S603
    steps = {}
    for path in sorted((ROOT / "target" / "criterion").glob("*/*/new/estimates.json")):
        if path.stat().st_mtime >= started.timestamp():
            estimates = json.loads(path.read_text(encoding="utf-8"))
            median = estimates["median"]
            interval = median["confidence_interval"]
            steps["/".join(path.parts[-4:-2])] = {
                "median_us": median["point_estimate"] / 1000,
                "median_95_us": [interval["lower_bound"] / 1000, interval["upper_bound"] / 1000],
                "mean_us": estimates["mean"]["point_estimate"] / 1000,
            }
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    revision = subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603
    raw = {
        "command": " ".join(COMMAND),
        "started": started.isoformat(timespec="seconds"),
        "revision": revision,
        "machine": facts,
        "plan_and_apply_per_step": steps,
    }
    path = ROOT / "bench" / "runs" / f"{started:%Y-%m-%d}-{facts['vendor']}-{facts['num_cores']}c-scheduler.json"
    path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
