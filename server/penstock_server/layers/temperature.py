"""Queries that are scaled by their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries grow with their position, so that attention over long contexts stays as sharp
    (https://arxiv.org/abs/2501.19399)."""

    period: int  # positions between two steps of the factor, which is 1 in the first period
    strength: float
    counts_from_one: bool = True  # positions, as Llama 4 does; Ministral 3 counts them from 0

    def __post_init__(self) -> None:
        if self.period < 1:
            keys = "floor_scale, or original_max_position_embeddings,"
            raise ConfigError(f"config.json: {keys} must be at least 1, not {self.period}")

    @property
    def row_positions(self) -> int:
        """Positions that share a row of `factors`."""
        return self.period if self.counts_from_one else 1

    def factors(self, max_positions: int, device: torch.device) -> Tensor:
        """[rows] float32; of a position, the one at (position + 1) // row_positions."""
        periods = torch.arange((max_positions + 1) // self.row_positions + 1, device=device)
        if not self.counts_from_one:
            periods = (periods - 1) // self.period
        return torch.log1p(periods.float()) * self.strength + 1.0
