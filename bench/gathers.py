"""The time of one gather between two ranks of this host: what a layer waits for its other rank."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

NUM_ROWS = (1, 8)
COLUMNS = 576  # hidden size of the embedded model
NUM_GATHERS, NUM_PARTS = 20, 100


def gather_times() -> dict[str, float]:
    """Seconds of one gather in bfloat16, by rows: the median over parts of many in a row."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(2) as ranks:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        times, _ = ranks.starmap(_times_of_rank, [(rank, rendezvous) for rank in (0, 1)], chunksize=1)
    return times


def _times_of_rank(rank: int, rendezvous: str) -> dict[str, float]:
    import torch
    from penstock_server.device.native.build import find_build
    from penstock_server.parallel import RankGroup, Split, split_evenly

    torch.set_num_threads(1)
    build = find_build(torch.device("cpu"), torch.bfloat16)
    group = RankGroup.join(rank, 2, rendezvous, "gloo", build)
    split = Split(rank, tuple(split_evenly(COLUMNS, each, 2) for each in (0, 1)))
    widths, times = split.widths(), {}
    for num_rows in NUM_ROWS:
        mine = torch.full((num_rows, widths[rank]), rank, dtype=torch.bfloat16)
        parts = []
        for _ in range(NUM_PARTS):
            start = time.perf_counter()
            for _ in range(NUM_GATHERS):
                group.all_gather_columns(mine, widths)
            parts.append((time.perf_counter() - start) / NUM_GATHERS)
        times[str(num_rows)] = statistics.median(parts)
    group.leave()
    return times
