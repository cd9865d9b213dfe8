"""Linear layers over the ranks: projections fused into one matrix, and projections out of a dimension that is split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.kernels.ops import Ops, PackedLinear, Unread
from penstock_server.layers.shard import Shard
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


def rows_parameters(name: str, shape: tuple[int, int], rows: range, bias: bool) -> dict[str, Parameter]:
    """A projection of which this rank computes some results. shape: [out_features, in_features] over all ranks."""
    table = {f"{name}.weight": Parameter(shape, Part(0, rows))}
    if bias:
        table[f"{name}.bias"] = Parameter(shape[:1], Part(0, rows))
    return table


def out_parameters(name: str, shape: tuple[int, int], columns: range, shard: Shard, bias: bool) -> dict[str, Parameter]:
    """A projection from a split dimension, of which this rank has `columns`, to the hidden one; see `Shard.exact`."""
    if shard.exact:
        return rows_parameters(name, shape, shard.hidden.mine, bias)
    table = {f"{name}.weight": Parameter(shape, Part(1, columns))}
    if bias:
        table[f"{name}.bias"] = Parameter(shape[:1])
    return table


def read_fused(loader: Loader, names: list[str]) -> tuple[Unread, Tensor | None]:
    """Weight and bias of projections of one input, their rows one behind the other. All have a bias or none."""
    weights, biases = [f"{name}.weight" for name in names], [f"{name}.bias" for name in names]
    return loader.unread(*weights), loader.read_if_there(*biases)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the input and the output of a projection are dealt out to the ranks."""

    group: RankGroup
    exact: bool  # split by results over gathered inputs; otherwise by inputs, and results summed
    in_widths: tuple[int, ...]
    out_widths: tuple[int, ...]

    @classmethod
    def into_hidden(cls, shard: Shard, in_widths: tuple[int, ...]) -> Layout:
        return cls(shard.group, shard.exact, in_widths, shard.hidden.widths())


@dataclass(frozen=True, slots=True)
class LinearOut:
    """A projection from a split dimension to one that all ranks have."""

    linear: PackedLinear
    layout: Layout
    dtype: torch.dtype  # of inputs and outputs

    @classmethod
    def load(cls, loader: Loader, ops: Ops, name: str, layout: Layout) -> LinearOut:
        weight, bias = loader.unread(f"{name}.weight"), loader.read_if_there(f"{name}.bias")
        # Of a sum only one summand may hold the bias.
        adds_bias = layout.exact or layout.group.rank == 0
        return cls(ops.pack_linear(weight, bias if adds_bias else None), layout, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, this rank's part of the input] → [rows, output], the same on all ranks."""
        layout = self.layout
        if not layout.exact:
            return layout.group.all_reduce(self.linear(x))
        gathered = layout.group.all_gather_columns(x, layout.in_widths)
        return layout.group.all_gather_columns(self.linear(gathered), layout.out_widths)
