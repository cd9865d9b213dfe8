"""Each rank's shard of a model's parameters, computed from the parameter table."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.shard import Shard
from penstock_server.models.parameters import parameters
from penstock_server.models.registry import read_spec
from penstock_server.models.tie import fit, same_in
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Checkpoint
from penstock_server.weights.format import open_checkpoint
from penstock_server.weights.loader import Loader, Parameter


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: checkpoint.shape(name) for name in checkpoint.names()}


def tables(folder: Path, size: int, exact: bool) -> list[dict[str, Parameter]]:
    """The parameter table of each rank."""
    spec, names = read_spec(folder)
    checkpoint, _ = open_checkpoint(folder)
    spec = fit(spec, names, None, shapes_of(checkpoint), same_in(checkpoint)).spec
    shards = [Shard.of(spec.hidden_size, spec.vocab_size, RankGroup(rank, size), exact) for rank in range(size)]
    return [parameters(spec, WeightLayout(shard)) for shard in shards]


def open_loader(folder: Path, group: RankGroup, exact: bool) -> Loader:
    """One rank's loader, in float32."""
    spec, names = read_spec(folder)
    checkpoint, locator = open_checkpoint(folder)
    fitted = fit(spec, names, locator, shapes_of(checkpoint), same_in(checkpoint))
    layout = WeightLayout(Shard.of(spec.hidden_size, spec.vocab_size, group, exact))
    table = parameters(fitted.spec, layout)
    return Loader(checkpoint, table, fitted.locator, torch.float32, torch.device("cpu"))


def held_bytes(folder: Path, rank: int, size: int, exact: bool) -> int:
    """Weight bytes of one rank in float32."""
    return 4 * sum(math.prod(parameter.local_shape) for parameter in tables(folder, size, exact)[rank].values())


def num_copied_elements(folder: Path, size: int, exact: bool) -> dict[str, int]:
    """For each parameter with replicas, the number of elements that the ranks hold beyond one copy.

    Fails if an element is on no rank.
    """
    of_ranks = tables(folder, size, exact)
    copied: dict[str, int] = {}
    for name, parameter in tables(folder, 1, exact)[0].items():
        parts = [table[name].part for table in of_ranks]
        if any(part is not None for part in parts):
            held = [part for part in parts if part is not None]
            assert len(held) == size, name
            dimension = (held[0].view or parameter.shape)[held[0].dim]
            assert {index for part in held for index in part.range} == set(range(dimension)), name
        numbers = sum(math.prod(table[name].local_shape) for table in of_ranks) - math.prod(parameter.local_shape)
        assert numbers >= 0
        if numbers:
            copied[name] = numbers
    return copied
