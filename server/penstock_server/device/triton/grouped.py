"""Layers of many experts: one launch multiplies each row by the weights of its experts, and one adds the results up.
The host learns nothing of which experts were chosen, so a step can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.grouped_kernel import grouped_kernel, weighted_sum_kernel
from penstock_server.device.triton.quantized import Segment
from penstock_server.device.triton.quantized_kernel import grouped_product_kernel

_SUM_WIDTH = 1024  # elements of a program
_MAX_PARTS = 16  # programs that share an expert's tiles of rows, so that one with many rows is not the last to end


@dataclass(frozen=True, slots=True)
class Gate:
    """What the outputs of a layer become if they are gate and up, one after the other."""

    activation: str = ""  # as the kernels know it; "": they stay as they are
    alpha: float = 0.0  # alpha of a clamped SwiGLU
    limit: float = 0.0


NO_GATE = Gate()


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes at a time. The order of sums does not depend on it."""

    columns: int
    rows: int
    depth: int  # depth of dense weights
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows_per_expert: float, dtype: torch.dtype) -> Tile:
        """rows_per_expert: as expected. Programs fit the 99 KiB of shared memory of compute capability 8.6."""
        if dtype.itemsize > 2:
            return cls(64, 16, 32, 4, 2)
        if rows_per_expert > 64:
            return cls(128, 128, 64, 8, 3)
        if rows_per_expert > 8:
            return cls(64, 32 if rows_per_expert <= 16 else 64, 64, 4, 3)
        return cls(64, 16, 128, 4, 3)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of rows to experts. A pair is a row and one of its experts; pair p is row p // top_k."""

    weights: Tensor  # [rows, top_k] float32, or with one more: the weight of the shared expert
    experts: Tensor  # [rows, top_k] int32
    counts: Tensor  # [experts on this rank] int32: their pairs
    pairs: Tensor  # [experts on this rank, rows] int32: for each expert its pairs, in any order
    num_experts: int  # on all ranks

    @property
    def num_pairs(self) -> int:
        return self.experts.numel()

    @property
    def rows_per_expert(self) -> float:
        return self.num_pairs / self.num_experts


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """One linear layer for each expert on this rank."""

    weight: Tensor  # [experts, columns, in_features]
    bias: Tensor | None  # [experts, columns]
    gate: Gate = NO_GATE

    @property
    def out_features(self) -> int:
        return self.weight.shape[1] // (2 if self.gate.activation else 1)

    def __call__(self, x: Tensor, assignment: Assignment, output: Tensor) -> None:
        """x [pairs or rows, in_features] → output [pairs, out_features]: of each pair, or of its row. Pairs of
        other ranks' experts are left as they are."""
        num_experts, columns, depth = self.weight.shape
        tile = Tile.of(assignment.rows_per_expert, x.dtype)
        _launch(
            grouped_kernel,
            tile,
            self.gate,
            assignment,
            x,
            output,
            weight=self.weight,
            bias=self.bias,
            EXPERTS=num_experts,
            COLUMNS=columns,
            DEPTH=depth,
            TILE_DEPTH=tile.depth,
            num_stages=tile.num_stages,
        )


@dataclass(frozen=True, slots=True)
class GroupedQuantized:
    """`GroupedLinear` with quantized weights."""

    segment: Segment  # the outputs of all experts, one expert after the other
    num_experts: int  # on this rank
    bias: Tensor | None  # [experts, columns]
    columns_order: Tensor | None  # [experts, in_features] int32: as of `QuantizedMatrix.order`
    gate: Gate = NO_GATE

    @property
    def out_features(self) -> int:
        return self._columns // (2 if self.gate.activation else 1)

    @property
    def _columns(self) -> int:
        return self.segment.num_columns // self.num_experts

    def __call__(self, x: Tensor, assignment: Assignment, output: Tensor) -> None:
        """x [pairs or rows, in_features] → output [pairs, out_features], like `GroupedLinear`."""
        rows_per_expert = assignment.rows_per_expert
        if not triton_device.shares_accumulators(x.device):
            rows_per_expert = min(rows_per_expert, 64)
        tile = Tile.of(rows_per_expert, x.dtype)
        _launch(
            grouped_product_kernel,
            tile,
            self.gate,
            assignment,
            x,
            output,
            weight=self.segment.weight,
            bias=self.bias,
            columns_order=self.columns_order,
            EXPERTS=self.num_experts,
            COLUMNS=self._columns,
            FORM=self.segment.form,
            num_stages=2,
        )


def _launch(
    kernel: object, tile: Tile, gate: Gate, assignment: Assignment, x: Tensor, output: Tensor, **arguments: Any
) -> None:
    num_rows = assignment.experts.shape[0]
    num_parts = min(_MAX_PARTS, -(-num_rows // tile.rows))
    triton_device.launch(
        kernel,
        (-(-arguments["COLUMNS"] // tile.columns), arguments["EXPERTS"] * num_parts),
        output=output,
        x=x.contiguous(),
        counts=assignment.counts,
        pairs=assignment.pairs,
        num_rows=num_rows,
        rows_per_input=assignment.num_pairs // max(1, x.shape[0]),
        num_parts=num_parts,
        ACTIVATION=gate.activation,
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        TILE_COLUMNS=tile.columns,
        TILE_ROWS=tile.rows,
        num_warps=tile.num_warps,
        **arguments,
    )


def weighted_sum(results: Tensor, assignment: Assignment, shared: Tensor | None, experts: range) -> Tensor:
    """results [pairs, features] → [rows, features]: the sums of each row's experts in order, of these experts only, and
    then of the shared expert's result [rows, features]. It ends the assignment: its counts become zero."""
    (num_rows, top_k), features = assignment.experts.shape, results.shape[1]
    output = torch.empty((num_rows, features), dtype=results.dtype, device=results.device)
    mine = assignment.counts.shape[0]
    triton_device.launch(
        weighted_sum_kernel,
        (num_rows, -(-features // _SUM_WIDTH)),
        output=output,
        results=results,
        weights=assignment.weights,
        experts=assignment.experts,
        counts=assignment.counts,
        shared=shared,
        shared_stride=0 if shared is None else shared.stride(0),
        TOP_K=top_k,
        NUM_WEIGHTS=assignment.weights.shape[1],
        FIRST=experts.start,
        EXPERTS=len(experts),
        MINE=mine,
        FEATURES=features,
        WIDTH=_SUM_WIDTH,
        MINE_WIDTH=1 << (mine - 1).bit_length(),
        num_warps=4,
    )
    return output
