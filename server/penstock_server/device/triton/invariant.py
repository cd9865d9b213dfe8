"""The operators of `--deterministic` on CUDA devices: a row has the same bits in every batch.

Only products with dense matrices differ from `TritonOps`: the matrix library selects its kernels by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock_server.device.ops import HeadProduct, PackedLinear, PackedRecurrence, Weight, whole
from penstock_server.device.state import Recurrence
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.ops import TritonOps, power_of_two
from penstock_server.device.triton.product_kernel import product_kernel, sum_kernel
from penstock_server.errors import ConfigError

_SPLIT_DEPTH = 1024  # features of a split
_FEW_PROGRAMS = 256  # a product with fewer tiles runs a program for each split
_MAX_PARTIAL_BYTES = 32 << 20
_SUM_WIDTH = 1024  # columns of a program


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes. INVARIANT: it depends on the weight alone, never on the number of rows."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_columns: int, dtype: torch.dtype) -> Tile:
        """Programs fit the 99 KiB of shared memory of compute capability 8.6."""
        columns = max(16, power_of_two(num_columns))
        if dtype.itemsize > 2:
            return cls(64, min(64, columns), 32, 4, 2)
        return cls(128, min(128, columns), 64, 8, 3)


@dataclass(frozen=True, slots=True)
class Product:
    """Products with one or several matrices, in the order of sums that `triton_product_kernel` fixes."""

    weight: Tensor  # [matrices, columns, depth]
    bias: Tensor | None  # [matrices, columns]
    tile: Tile
    split_depth: int = _SPLIT_DEPTH  # features of a split, a multiple of the tile's depth

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Product:
        tile = Tile.of(weight.shape[1], weight.dtype)
        return cls(weight.contiguous(), None if bias is None else bias.contiguous(), tile)

    @property
    def num_splits(self) -> int:
        return -(-self.weight.shape[2] // self.split_depth)

    def apply(self, x: Tensor, y: Tensor) -> None:
        """x [rows, matrices, depth] → y [rows, matrices, columns]. The last dimension of both is contiguous."""
        matrices, columns, depth = self.weight.shape
        num_rows, tile = x.shape[0], self.tile
        num_tiles = -(-num_rows // tile.rows) * -(-columns // tile.columns)
        num_partials = 0
        if self.num_splits > 1 and matrices * num_tiles < _FEW_PROGRAMS:
            needed = 4 * self.num_splits * num_rows * matrices * columns
            num_partials = self.num_splits if needed <= _MAX_PARTIAL_BYTES else 0
        # Always a tensor: a kernel compiled for None would be another one.
        sizes = (num_partials, num_rows, matrices, columns) if num_partials else (0,)
        partials = torch.empty(sizes, dtype=torch.float32, device=x.device)
        shared = {
            "y": y,
            "partials": partials,
            "bias": self.bias,
            "Y_ROW": y.stride(0),
            "Y_MATRIX": y.stride(1),
            "MATRICES": matrices,
            "COLUMNS": columns,
        }
        triton_device.launch(
            product_kernel,
            (num_tiles, matrices * max(1, num_partials)),
            **shared,
            x=x,
            weight=self.weight,
            num_rows=num_rows,
            num_partials=num_partials,
            X_ROW=x.stride(0),
            X_MATRIX=x.stride(1),
            DEPTH=depth,
            SPLIT=self.split_depth,
            # Tensor cores would round float32 to tf32.
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            TILE_ROWS=tile.rows,
            TILE_COLUMNS=tile.columns,
            TILE_DEPTH=tile.depth,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if num_partials:
            grid = (num_rows, matrices * -(-columns // _SUM_WIDTH))
            triton_device.launch(sum_kernel, grid, **shared, SPLITS=num_partials, WIDTH=_SUM_WIDTH, num_warps=4)


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """Implements `PackedLinear`."""

    product: Product  # product of one matrix
    dtype: torch.dtype  # dtype of the result
    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        # The kernel is compiled for the strides, and those of a single row may be any.
        rows = x.reshape(-1).view(x.shape[0], 1, self.in_features)
        y = torch.empty((x.shape[0], 1, self.out_features), dtype=self.dtype, device=x.device)
        self.product.apply(rows, y)
        return y.view(x.shape[0], self.out_features)


class InvariantOps(TritonOps):
    """Implements `Ops`."""

    def pack_recurrence(self, net: Recurrence) -> PackedRecurrence:
        raise ConfigError("--deterministic is not possible on a GPU for layers that keep a state: no kernel is there")

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        weight = whole(weight)
        product = Product.of(weight[None], None if bias is None else bias[None])
        return InvariantLinear(product, weight.dtype, *weight.shape)

    def pack_wide(self, weight: Tensor) -> PackedLinear:
        return InvariantLinear(Product.of(weight[None], None), torch.float32, *weight.shape)

    def pack_heads(self, weight: Tensor) -> HeadProduct:
        return partial(_apply_heads, Product.of(weight, None))


def _apply_heads(product: Product, x: Tensor, out: Tensor) -> None:
    product.apply(x if x.stride(-1) == 1 else x.contiguous(), out)
