"""One rank as a process: `collective_program.py ACTION RANK SIZE RENDEZVOUS`. It prints what the test expects."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from model_driver import ModelDriver, is_native
from penstock_server.collectives import shared_memory
from penstock_server.collectives.distributed import Distributed
from penstock_server.collectives.shared_memory import SharedMemory
from penstock_server.device.native.build import find_build
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tested_isa import use_tested_isa
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32, torch.int64)


def part(rows: int, width: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + width)
    return torch.randint(-99, 99, (rows, width), generator=generator).to(dtype)


def compare(group: RankGroup) -> None:
    """Both kinds of collectives give the same tensors."""
    shared, distributed = group.collectives, Distributed()
    assert isinstance(shared, SharedMemory)
    for dtype in DTYPES:
        for rows, unit in ((1, 5), (0, 5), (7, 1), (600, 401)):
            widths = tuple(unit * (rank + 1) for rank in range(group.size))
            x = part(rows, widths[group.rank], group.rank, dtype)
            # Columns of a wider tensor.
            wide = part(rows, 2 * widths[group.rank], group.rank, dtype)[:, : widths[group.rank]]
            for mine in (x, wide):
                found = shared.all_gather_columns(mine, widths)
                assert torch.equal(found, distributed.all_gather_columns(mine, widths))
            for reduce in (shared.all_reduce, shared.broadcast):
                x = part(rows, unit, group.rank, dtype)
                same = distributed.all_reduce if reduce == shared.all_reduce else distributed.broadcast
                expected = same(x.clone())
                assert reduce(x) is x
                assert torch.equal(x, expected)
    assert shared.minimum(10 - group.rank) == 11 - group.size
    print("equal", flush=True)


def outlive(group: RankGroup) -> None:
    """Rank 0 waits for a rank that the test kills."""
    print("ready", flush=True)
    if group.rank > 0:
        time.sleep(3600)
    try:
        group.minimum(0)
    except RuntimeError as error:
        print(error, flush=True)


def outlive_in_step(group: RankGroup, folder: Path) -> None:
    """The same inside the one native call of a step, on two threads."""
    torch.set_num_threads(2)
    model = load_model(LoadOptions(folder, torch.bfloat16, torch.device("cpu"), 16), group)
    assert isinstance(model, Decoder)
    assert is_native(model)
    driver = ModelDriver(model, 16, 16)
    sequence = driver.sequence(list(range(8)))
    driver.step([(sequence, 4)])
    print("ready", flush=True)
    if group.rank > 0:
        time.sleep(3600)
    for _ in range(2):  # the group stays unusable
        try:
            driver.step([(sequence, 1)])
        except RuntimeError as error:
            print(error, flush=True)


def gloo_threads() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def main() -> None:
    action, rank, size, rendezvous = sys.argv[1:]
    use_tested_isa()
    torch.set_num_threads(1)
    if action == "apart":
        # As on two hosts.
        shared_memory._place = lambda: 1 + int(rank)
    group = RankGroup.join(int(rank), int(size), rendezvous, "gloo", find_build(torch.device("cpu"), torch.bfloat16))
    match action:
        case "compare":
            compare(group)
        case "outlive":
            outlive(group)
        case "outlive in step":
            outlive_in_step(group, Path(rendezvous.removeprefix("file://")).parent)
        case "apart":
            assert gloo_threads()
            x = torch.full((2, 3), group.rank)
            joined = group.all_gather_columns(x, (3,) * group.size)
            assert joined.tolist() == [[*([0] * 3), *([1] * 3)]] * 2
            print(type(group.collectives).__name__, flush=True)
    group.leave()
    assert not gloo_threads()


if __name__ == "__main__":
    main()
