"""One rank of a pipeline as a process: `pipeline_program.py RANK SIZE STAGES RENDEZVOUS`. Rows go through all stages,
which then agree on a number. The ranks exchange tensors by gloo."""

from __future__ import annotations

import sys

import torch
from penstock_server.collectives.distributed import Distributed
from penstock_server.parallel import RankGroup


def main() -> None:
    rank, size, num_stages, rendezvous = sys.argv[1:]
    group = RankGroup.join(int(rank), int(size), rendezvous, "gloo", None, int(num_stages))
    stage = group.stage
    assert isinstance(stage.before or stage.behind, Distributed)
    assert (group.num_ranks, stage.size, stage.is_last) == (int(size), int(num_stages), int(rank) < group.size)
    for step in range(3):
        rows = torch.full((2, 3), 100.0 * step + group.rank)
        if not stage.is_first:
            rows = stage.receive(torch.zeros(2, 3))
        assert (rows == 100 * step + group.rank + 10 * stage.index).all()
        if not stage.is_last:
            stage.send(rows + 10)
    summed = group.all_reduce(torch.tensor([float(stage.index)]))
    assert summed.item() == stage.index * group.size, "the sum is of this stage's ranks"
    assert group.minimum_of_all(50 - int(rank)) == 51 - int(size)
    group.leave()


if __name__ == "__main__":
    main()
