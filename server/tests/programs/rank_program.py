"""What a rank of a model computes, and one rank on a device as a process:
`rank_program.py FOLDER DTYPE RANK SIZE RENDEZVOUS OUT TEXTS NUM_TOKENS EXACT DEVICE`.

Rank 0 writes what `run` found for the texts (JSON lists of ids) to OUT. DEVICE: one for all ranks, which then exchange
tensors by gloo; or `cuda`: a device for each, and NCCL.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from model_driver import ModelDriver, is_native
from penstock_server.collectives.distributed import Distributed
from penstock_server.collectives.shared_memory import SharedMemory
from penstock_server.device.native.build import find_build
from penstock_server.engine.device import choose_device, open_device
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tested_isa import use_tested_isa

CPU = torch.device("cpu")


def join(rank: int, size: int, rendezvous: str, dtype: torch.dtype) -> RankGroup:
    """The group, whose ranks share memory wherever native kernels are installed."""
    native = find_build(CPU, dtype)
    group = RankGroup.join(rank, size, rendezvous, "gloo", native)
    if size > 1 and native is not None:
        assert isinstance(group.collectives, SharedMemory)
    return group


def join_on_device(rank: int, size: int, rendezvous: str, name: str) -> tuple[RankGroup, torch.device]:
    """name: as DEVICE."""
    device = choose_device("" if name == "cuda" else name, rank)
    open_device(device)
    if name == "cuda":
        return RankGroup.join(rank, size, rendezvous, "nccl", None), device
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    return RankGroup(rank, size, Distributed()), device


def run(
    folder: Path,
    dtype: str,
    group: RankGroup,
    texts: list[list[int]],
    num_tokens: int,
    exact: bool = True,
    sources: list[int] | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """The logits of a mixed batch and the greedy tokens of the texts. All ranks have the same bits.

    sources: for a model with an encoder, how many of each text's tokens are the encoder's."""
    model = load_model(LoadOptions(folder, getattr(torch, dtype), device, 16), group, exact)
    driver = ModelDriver(model, block_tokens=16, num_blocks=256, device=device)
    sequences = [driver.sequence(*of_one) for of_one in zip(texts, sources or [0] * len(texts), strict=True)]
    halves = [(sequence, max(len(sequence.token_ids) // 2, sequence.num_source)) for sequence in sequences]
    driver.step([(sequence, half) for sequence, half in halves if half])
    rest = [(sequence, len(sequence.token_ids) - sequence.num_computed) for sequence in sequences]
    logits = driver.step(rest)
    for sequence in sequences:
        driver.free(sequence)
    bits = zlib.crc32(logits.view(torch.uint8).numpy().tobytes())
    assert group.minimum(bits) == -group.minimum(-bits)
    return {
        "logits": logits,
        "tokens": driver.greedy(texts, num_tokens, chunk_tokens=16, sources=sources),
        "is_one_call": is_native(model),
        "weight_bytes": model.weight_bytes,
        "smallest": group.minimum(model.weight_bytes),
    }


def main() -> None:
    folder, dtype, rank, size, rendezvous, out, texts, num_tokens, exact, name = sys.argv[1:]
    use_tested_isa()
    torch.set_num_threads(1)
    group, device = join_on_device(int(rank), int(size), rendezvous, name)
    result = run(Path(folder), dtype, group, json.loads(texts), int(num_tokens), exact == "exact", device=device)
    if group.rank == 0:
        torch.save(result, out)
    group.leave()


if __name__ == "__main__":
    main()
