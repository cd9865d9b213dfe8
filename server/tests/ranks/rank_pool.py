"""Rank processes that are shared by all tests of a file, because importing torch takes longer than a test.

`python rank_pool.py` is one rank: it reads jobs from stdin, one JSON object per line, and replies with a line each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from program_environment import program_environment


class RankPool:
    """`size` processes. Smaller groups use the first of them."""

    def __init__(self, size: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__],
                env=program_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(size)
        ]

    def run(self, folder: Path, size: int, **arguments: Any) -> Any:
        """The result of `rank_program.run` with these arguments on rank 0, and `ranks_weight_bytes`, the weight bytes
        of each rank."""
        import torch

        with tempfile.TemporaryDirectory() as place:
            job = {
                "folder": str(folder),
                "size": size,
                "rendezvous": f"file://{place}/rendezvous",
                "arguments": arguments,
                "out": f"{place}/out",
            }
            ranks = self.processes[:size]
            for rank, process in enumerate(ranks):
                assert process.stdin is not None
                process.stdin.write(json.dumps({**job, "rank": rank}) + "\n")
                process.stdin.flush()
            answers = [process.stdout.readline() if process.stdout is not None else "" for process in ranks]
            assert all(answer.startswith("done ") for answer in answers), answers
            weight_bytes = [int(answer.split()[1]) for answer in answers]
            return {**torch.load(f"{place}/out"), "ranks_weight_bytes": weight_bytes}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> None:
    import torch
    from rank_program import join, run
    from tested_isa import use_tested_isa

    use_tested_isa()
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        group = join(job["rank"], job["size"], job["rendezvous"], getattr(torch, job["arguments"]["dtype"]))
        result = run(Path(job["folder"]), group=group, **job["arguments"])
        if group.rank == 0:
            torch.save(result, job["out"])
        group.leave()
        print("done", result["weight_bytes"], flush=True)


if __name__ == "__main__":
    main()
