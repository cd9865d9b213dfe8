"""Engines of two ranks that hold the whole fake model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from fake_model import BLOCK_TOKENS, FakeModel
from penstock_server.engine import Engine
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PairedGroup(RankGroup):
    """Rank 0 and rank 1 in one thread: rank 1 takes the broadcasts of rank 0 later."""

    sent: deque[torch.Tensor] = field(default_factory=deque)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.popleft())

    def minimum(self, value: int) -> int:
        return value


def paired_engines(limits: WarmUpConfig, computes_alike: bool = True) -> list[Engine]:
    """Each rank holds all of the fake model."""
    sent: deque[torch.Tensor] = deque()
    engines = [
        Engine(FakeModel(), PairedGroup(rank, 2, computes_alike=computes_alike, sent=sent), CPU, BLOCK_TOKENS)
        for rank in (0, 1)
    ]
    for engine in engines:
        engine.warm_up(limits)
    return engines
