"""Sums of small tensors over GPUs that read each other's memory (torch's symmetric memory): there, NCCL's latency is
most of a decode step's communication. Everything else goes through NCCL.

Not run on GPUs yet: a sum is checked when the ranks connect, and they use NCCL if it is wrong on any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock_server.collectives.distributed import Distributed

# Each rank reads the tensors of all others, so large sums are faster by NCCL, which splits them.
MAX_BYTES = 512 << 10
_UNIT_BYTES = 16  # that the kernel reads at a time


class SymmetricMemory(Distributed):
    """Implements `Collectives`. All ranks get the same sums, in the order of the ranks."""

    def __init__(self, buffer: Tensor, summed: Callable[[Tensor], Tensor]) -> None:
        """buffer [bytes] uint8, symmetric memory of all ranks; summed: the sum of all ranks' tensors in it."""
        super().__init__()
        self._buffer = buffer
        self._summed = summed

    def all_reduce(self, x: Tensor) -> Tensor:
        num_bytes = x.numel() * x.element_size()
        if not 0 < num_bytes <= self._buffer.numel() or num_bytes % _UNIT_BYTES or not x.is_floating_point():
            return super().all_reduce(x)
        mine = self._buffer[:num_bytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        return x.copy_(self._summed(mine))


def unavailable_reason(size: int) -> str | None:
    """Why this rank's device cannot read the memory of the others, for people. None: it can."""
    try:
        import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this torch has no symmetric memory ({error})"
    device = torch.cuda.current_device()
    # Rank r runs on the r-th visible device.
    for other in range(size):
        if other != device and not torch.cuda.can_device_access_peer(device, other):
            return f"device {device} cannot read the memory of device {other}"
    return None


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _operators() -> Any:
    return torch.ops.symm_mem


def share(rank: int, size: int) -> tuple[SymmetricMemory | None, str]:
    """The collectives after a sum that was right on this rank, or why there are none. Every rank must take part."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    name = group.group_name
    try:
        buffer = symmetric.empty(MAX_BYTES, dtype=torch.uint8, device=_device())
        symmetric.rendezvous(buffer, name)
        shared = SymmetricMemory(buffer, lambda mine: _operators().one_shot_all_reduce(mine, "sum", name))
        found = shared.all_reduce(torch.full((64,), float(rank + 1), device=_device())).tolist()
    except RuntimeError as error:
        return None, str(error).strip().split("\n", 1)[0]
    expected = size * (size + 1) / 2
    return (shared, "") if found == [expected] * 64 else (None, f"a sum was {found[0]}, not {expected}")
