"""LoRA adapters on CUDA devices: two launches add to the product of a layer what the adapters of its rows add.

Each adapter is a piece of memory of its own, and steps name adapters by their addresses. So adapters of any rank take
what they need, an adapter that running sequences have can stay while others come, and a recorded step runs with any.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.low_rank_kernel import FIELDS, expand_kernel, look_up_kernel, shrink_kernel

TILE_RANKS = 16
WORKSPACE_BYTES = 64 << 20  # workspace of a step, for the products with A
_ALIGNMENT = 16  # elements between the matrices of an adapter
_MAX_TURNS = 8  # programs that share the runs of a tile of rows
_MAX_PARTIAL_BYTES = 8 << 20
# INVARIANT: tiles and splits do not depend on the step.
_TILE_ROWS = 32
_TILE_DEPTH = 128
_TILE_COLUMNS = 128
_SPLIT_DEPTH = 512  # features of a split


@dataclass(frozen=True, slots=True)
class PlainPart:
    """What an adapter adds to the outputs of one module on this rank: scale · up(down(x))."""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [columns, rank]
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAdapter:
    """An adapter in the device's memory."""

    weights: Tensor
    table: Tensor  # as in `shrink_kernel`

    @classmethod
    def pack(cls, parts: Sequence[PlainPart | None], dtype: torch.dtype, device: torch.device) -> DeviceAdapter:
        """parts: of all layers, in the order of their numbers; None: nothing is added."""
        sizes = [size for part in parts if part is not None for size in _sizes(part)]
        packed = torch.zeros(sum(sizes), dtype=dtype)
        pieces = iter(packed.split(sizes))
        starts = accumulate(sizes, initial=0)
        weights = torch.empty(len(packed), dtype=dtype, device=device)
        first = address_of(weights)
        table = []
        for part in parts:
            if part is None:
                table.append((0, 0, 0, 0))
                continue
            (rank, in_features), columns = part.down.shape, part.up.shape[0]
            next(pieces)[: rank * in_features].view(rank, in_features).copy_(part.down)
            next(pieces).view(columns, -1)[:, :rank].copy_(part.up)
            down, up = (first + next(starts) * dtype.itemsize for _ in range(2))
            (bits,) = struct.unpack("<i", struct.pack("<f", part.scale))
            table.append((down, up, rank, bits))
        weights.copy_(packed)
        return cls(weights, torch.tensor(table, dtype=torch.int64).to(device))

    @property
    def address(self) -> int:
        """Address of its table, by which steps name it."""
        return address_of(self.table)


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """What adapters add to the product of one layer."""

    first_part: int  # the number of the layer's first part among those of all layers
    num_parts: int
    tiles: Tensor  # as in `expand_kernel`
    alignment: int  # as in `expand_kernel`
    max_rank: int  # a multiple of TILE_RANKS
    num_turns: int
    expert_parts: int = 0  # as in `shrink_kernel`

    @classmethod
    def of(
        cls,
        first_part: int,
        columns: Sequence[range],
        max_rank: int,
        max_adapters: int,
        device: torch.device,
        expert_parts: int = 0,
    ) -> LowRankSum:
        """columns: the layer's outputs that belong to each part; those of its own layer if each part has one.
        expert_parts: as in `shrink_kernel`; the columns are those of each expert."""
        tiles = [
            (part, its.start, first, len(its))
            for part, its in enumerate(columns)
            for first in range(0, len(its), _TILE_COLUMNS)
        ]
        max_rank = -(-max_rank // TILE_RANKS) * TILE_RANKS
        on_device = torch.tensor(tiles, dtype=torch.int32).to(device)
        alignment = math.gcd(_ALIGNMENT, *(place for its in columns for place in (its.start, its.stop)))
        num_turns = _MAX_TURNS if expert_parts else min(_MAX_TURNS, max_adapters)
        return cls(first_part, len(columns), on_device, alignment, max_rank, num_turns, expert_parts)

    def add(self, x: Tensor, y: Tensor, of_rows: Tensor, tables: Tensor) -> None:
        """Adds to y [rows, columns], the layer's product with x [rows, in_features], what the rows' adapters add; to y
        [rows, parts, columns] if each part has a layer and an input [rows, parts, in_features] of its own. of_rows,
        tables: as in `shrink_kernel`."""
        max_rows = max(1, WORKSPACE_BYTES // (4 * self.num_parts * self.max_rank))
        parts = zip(x.split(max_rows), y.split(max_rows), of_rows.split(max_rows), strict=True)
        for x_part, y_part, of_part in parts:
            self._add_to_rows(x_part, y_part, of_part, tables)

    def add_of_experts(self, x: Tensor, y: Tensor, pairs: ExpertPairs) -> None:
        """Adds to y [pairs, columns], the products of each pair's expert with x [pairs or rows, in_features], what the
        adapters of the pairs add."""
        max_rows = max(1, WORKSPACE_BYTES // (4 * self.num_parts * self.max_rank))
        for order, of_rows in zip(pairs.order.split(max_rows), pairs.of_rows.split(max_rows), strict=True):
            self._add_to_rows(x, y, of_rows, pairs.tables, order)

    def add_looked_up(self, num_tokens: int, token_ids: Tensor, y: Tensor, of_rows: Tensor, tables: Tensor) -> None:
        """Adds to y [rows, columns], the embeddings of token_ids [rows] int64 of `num_tokens`, what the rows' adapters
        add."""
        max_rows = max(1, WORKSPACE_BYTES // (4 * self.max_rank))
        parts = zip(token_ids.split(max_rows), y.split(max_rows), of_rows.split(max_rows), strict=True)
        for ids_part, y_part, of_part in parts:
            num_rows = len(ids_part)
            inner = torch.empty((1, num_rows, 1, self.max_rank), dtype=torch.float32, device=y.device)
            triton_device.launch(
                look_up_kernel,
                (-(-num_rows // _TILE_ROWS), 1),
                inner=inner,
                token_ids=ids_part,
                dtype_of=y_part,
                of_rows=of_part,
                tables=tables,
                num_rows=num_rows,
                num_tokens=num_tokens,
                first_part=self.first_part,
                RANKS=self.max_rank,
                FIELDS=FIELDS,
                TILE_ROWS=_TILE_ROWS,
                TILE_RANKS=TILE_RANKS,
                num_warps=4,
            )
            self._expand(self._shared(inner, of_part, tables, 0, y.dtype), y_part)

    def _add_to_rows(self, x: Tensor, y: Tensor, of_rows: Tensor, tables: Tensor, order: Tensor | None = None) -> None:
        x = x if x.stride(-1) == 1 else x.contiguous()
        num_rows, depth = len(of_rows), x.shape[-1]
        num_splits = -(-depth // _SPLIT_DEPTH)
        split_bytes = 4 * num_rows * self.num_parts * self.max_rank
        # More rows are enough programs without the splits.
        num_partials = num_splits if 1 < num_splits <= _MAX_PARTIAL_BYTES // max(1, split_bytes) else 0
        num_inner = max(1, num_partials)
        sizes = (num_inner, num_rows, self.num_parts, self.max_rank)
        inner = torch.empty(sizes, dtype=torch.float32, device=x.device)
        shared = self._shared(inner, of_rows, tables, num_partials, y.dtype, order)
        triton_device.launch(
            shrink_kernel,
            (self._num_programs(num_rows), self.num_parts * num_inner),
            **shared,
            x=x,
            rows_per_input=len(y) // max(1, len(x)),
            X_ROW=x.stride(0),
            X_PART=x.stride(1) if x.dim() == 3 else 0,
            DEPTH=depth,
            SPLIT=_SPLIT_DEPTH,
            TILE_DEPTH=_TILE_DEPTH,
        )
        self._expand(shared, y)

    def _expand(self, shared: dict[str, Any], y: Tensor) -> None:
        assert y.stride(-1) == 1
        triton_device.launch(
            expand_kernel,
            (self._num_programs(shared["num_rows"]), self.tiles.shape[0]),
            **shared,
            y=y,
            tiles=self.tiles,
            ALIGNMENT=self.alignment,
            Y_ROW=y.stride(0),
            Y_PART=y.stride(1) if y.dim() == 3 else 0,
            TILE_COLUMNS=_TILE_COLUMNS,
        )

    def _num_programs(self, num_rows: int) -> int:
        return -(-num_rows // _TILE_ROWS) * self.num_turns

    def _shared(
        self,
        inner: Tensor,
        of_rows: Tensor,
        tables: Tensor,
        num_partials: int,
        dtype: torch.dtype,
        order: Tensor | None = None,
    ) -> dict[str, Any]:
        """The arguments of both kernels. dtype: of the layer."""
        return {
            "inner": inner,
            "of_rows": of_rows,
            "tables": tables,
            "order": order,
            "num_rows": len(of_rows),
            "num_adapters": len(tables),
            "num_partials": num_partials,
            "first_part": self.first_part,
            "PARTS": self.num_parts,
            "RANKS": self.max_rank,
            # Tensor cores round the factors of float32 models, too.
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "FIELDS": FIELDS,
            "EXPERT_PARTS": self.expert_parts,
            "TURNS": self.num_turns,
            "TILE_ROWS": _TILE_ROWS,
            "TILE_RANKS": TILE_RANKS,
            "num_warps": 4,
        }


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """The pairs of a row and one of its experts, ordered by expert and adapter. Those of other ranks' experts, and
    those without adapters, have none."""

    order: Tensor  # as in `shrink_kernel`, as the others
    of_rows: Tensor
    tables: Tensor

    @classmethod
    def of(cls, experts: Tensor, mine: range, of_tokens: Tensor, tables: Tensor) -> ExpertPairs:
        """experts [rows, top_k]; mine: those on this rank; of_tokens [rows]: the adapter of each row, or -1."""
        index, adapter = experts.long() - mine.start, of_tokens[:, None].expand(experts.shape)
        has_adapter = (index >= 0) & (index < len(mine)) & (adapter >= 0)
        keys = torch.where(has_adapter, index * len(tables) + adapter, -1).flatten()
        of_rows, order = keys.sort(stable=True)
        return cls(order, of_rows, tables)


def address_of(tensor: Tensor) -> int:
    """In the memory of its device."""
    return tensor.data_ptr()


def _sizes(part: PlainPart) -> tuple[int, int]:
    """Elements of A and of B, whose ranks are padded."""
    down = -(-part.down.numel() // _ALIGNMENT) * _ALIGNMENT
    return down, part.up.shape[0] * -(-part.up.shape[1] // TILE_RANKS) * TILE_RANKS
