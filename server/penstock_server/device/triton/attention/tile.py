"""The sizes that the attention kernels are compiled with.

INVARIANT: they depend on the layer's shape and the data type alone, never on the step, so that every query is computed
by the same instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock_server.device.attention.interface import AttentionShape

MIN_DIM = 16  # least dimension of an operand of tl.dot


@dataclass(frozen=True, slots=True)
class Tile:
    """The tiles of one layer's attention, and how a program computes them."""

    rows: int  # rows of a query tile: queries times query heads of one KV head
    keys: int  # keys of a key tile
    split_tokens: int  # positions of a split, a multiple of `keys`
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, is_fp8: bool = False) -> Tile:
        """Tiles that fit the shared memory and the registers of compute capability 8.0 and later. With three stages,
        block ids are loaded two tiles ahead, and keys and values one tile. is_fp8: of the cache, whose keys and values
        take registers while they are converted."""
        is_wide = dtype.itemsize > 2
        if shape.head_dim > 256:
            return cls(16, 16, 512, 8, 1) if is_wide else cls(32, 32, 512, 8, 3)
        if shape.head_dim > 128:
            return cls(32, 16, 512, 8, 2) if is_wide else cls(64, 32, 512, 8, 3)
        return cls(32, 32, 512, 8, 2) if is_wide else cls(64, 64, 512, 8 if is_fp8 else 4, 3)


def query_tile(group: int, rows: int) -> tuple[int, int]:
    """How a tile of `rows` rows is filled with `group` query heads per KV head: heads and queries of one tile."""
    heads = -(-group // -(-group // rows))
    return heads, rows // heads


def key_parts(shape: AttentionShape) -> tuple[int, int]:
    """The widths of the two parts that a key is read in: powers of two with little padding. The second may be 0. The
    first is the value, if the value is the beginning of the key and as wide as a power of two."""
    head_dim, value_dim = shape.head_dim, shape.output_dim
    if shape.values_in_keys and value_dim == padded_dim(value_dim) and value_dim < head_dim:
        return value_dim, padded_dim(head_dim - value_dim)
    main = max(MIN_DIM, 1 << (head_dim.bit_length() - 1))
    rest = padded_dim(head_dim - main) if head_dim > main else 0
    return (main, rest) if rest < main else (2 * main, 0)


def padded_dim(dim: int) -> int:
    return max(MIN_DIM, 1 << (dim - 1).bit_length())
