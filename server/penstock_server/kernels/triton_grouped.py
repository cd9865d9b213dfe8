"""Linear layers of many experts in one launch: rows are sorted by their expert on the device, and the host learns
nothing of the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.kernels import triton_device, triton_kernel
from penstock_server.kernels.triton_quantized import Segment
from penstock_server.kernels.triton_quantized_kernel import grouped_product_kernel

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 64, 64  # of a program; the same for any number of rows
_SUM_WIDTH = 1024  # elements of a program


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rows each expert processes. A pair is a row and one of its experts; pair p is row p // top_k."""

    num_pairs: int
    order: Tensor  # [pairs] int64: by expert
    ends: Tensor  # [experts on this rank] int64: the end of each expert's pairs in `order`
    tile_experts: Tensor  # [tiles] int64: index among the experts on this rank; their number: the tile is unused
    tile_starts: Tensor  # [tiles] int64: the tile's first pair in `order`


def assign(experts: Tensor, mine: range, num_experts: int) -> Assignment:
    """experts [rows, top_k] int64, of which this rank has `mine`. The number of tiles is an upper bound."""
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    ends = counts.cumsum(0)[mine.start : mine.stop]
    starts = ends - counts[mine.start : mine.stop]
    num_tiles = (ends - starts + (TILE_ROWS - 1)).div_(TILE_ROWS, rounding_mode="floor")
    tile_ends = num_tiles.cumsum(0)
    most = len(chosen) // TILE_ROWS + min(len(mine), len(chosen))
    tiles = torch.arange(most, device=chosen.device)
    tile_experts = torch.searchsorted(tile_ends, tiles, right=True)
    inside = tile_experts.clamp(max=len(mine) - 1)
    tile_starts = starts[inside] + (tiles - (tile_ends - num_tiles)[inside]) * TILE_ROWS
    return Assignment(len(chosen), order, ends, tile_experts, tile_starts)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """One linear layer for each expert on this rank."""

    weight: Tensor  # [experts, out_features, in_features]
    bias: Tensor | None  # [experts, out_features]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: Tensor, assignment: Assignment, rows_per_input: int) -> Tensor:
        """x [pairs // rows_per_input, in_features] → [pairs, out_features] in its dtype. Pair p reads row
        p // rows_per_input of x. Pairs whose expert is on another rank get zeros."""
        _, out_features, in_features = self.weight.shape
        x = x.contiguous()
        output = x.new_zeros((assignment.num_pairs, out_features))
        triton_device.launch(
            triton_kernel.grouped_kernel,
            (assignment.tile_experts.shape[0], -(-out_features // TILE_COLUMNS)),
            output=output,
            x=x,
            weight=self.weight,
            bias=self.bias,
            order=assignment.order,
            ends=assignment.ends,
            tile_experts=assignment.tile_experts,
            tile_starts=assignment.tile_starts,
            rows_per_input=rows_per_input,
            EXPERTS=self.weight.shape[0],
            COLUMNS=out_features,
            DEPTH=in_features,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            TILE_DEPTH=TILE_DEPTH if x.dtype.itemsize == 2 else TILE_DEPTH // 2,
            num_warps=4,
            num_stages=3,
        )
        return output


@dataclass(frozen=True, slots=True)
class GroupedQuantized:
    """`GroupedLinear` with quantized weights."""

    segment: Segment  # the outputs of all experts, one expert after the other
    num_experts: int  # on this rank
    bias: Tensor | None  # [experts, out_features]
    columns_order: Tensor | None  # [experts, in_features] int32: as of `QuantizedMatrix.order`

    @property
    def out_features(self) -> int:
        return self.segment.num_columns // self.num_experts

    def __call__(self, x: Tensor, assignment: Assignment, rows_per_input: int) -> Tensor:
        """As of `GroupedLinear`."""
        form, out_features = self.segment.form, self.out_features
        x = x.contiguous()
        output = x.new_zeros((assignment.num_pairs, out_features))
        triton_device.launch(
            grouped_product_kernel,
            (assignment.tile_experts.shape[0], -(-out_features // TILE_COLUMNS)),
            output=output,
            x=x,
            weight=self.segment.weight,
            bias=self.bias,
            columns_order=self.columns_order,
            order=assignment.order,
            ends=assignment.ends,
            tile_experts=assignment.tile_experts,
            tile_starts=assignment.tile_starts,
            rows_per_input=rows_per_input,
            EXPERTS=self.num_experts,
            COLUMNS=out_features,
            FORM=form,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            TILE_OUTPUTS=TILE_COLUMNS,
            TILE_ROWS=TILE_ROWS,
            num_warps=4,
            num_stages=2,
        )
        return output


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """results [rows, top_k, features], weights [rows, top_k] float32 → [rows, features] float32, summed in the order of
    top_k."""
    num_rows, top_k, features = results.shape
    output = torch.empty((num_rows, features), dtype=torch.float32, device=results.device)
    triton_device.launch(
        triton_kernel.weighted_sum_kernel,
        (num_rows, -(-features // _SUM_WIDTH)),
        output=output,
        results=results,
        weights=weights.contiguous(),
        TOP_K=top_k,
        FEATURES=features,
        WIDTH=_SUM_WIDTH,
        num_warps=4,
    )
    return output
