"""Loads linear layers: projections fused into one matrix, and projections that are split over the ranks by input."""

from __future__ import annotations

from torch import Tensor

from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.parallel import RankGroup
from penstock_server.weights.loader import Loader


def read_fused(loader: Loader, names: list[str]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of projections of one input, their rows one behind the other. All have a bias or none."""
    weights, biases = [f"{name}.weight" for name in names], [f"{name}.bias" for name in names]
    return loader.read(*weights), loader.read_if_there(*biases)


def load_input_split(loader: Loader, ops: Ops, name: str, group: RankGroup) -> PackedLinear:
    """A projection whose results are summed over the ranks. Only rank 0 adds the bias, so the sum holds it once."""
    bias = loader.read_if_there(f"{name}.bias")
    return ops.pack_linear(loader.read(f"{name}.weight"), bias if group.rank == 0 else None)
