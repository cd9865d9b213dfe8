"""The fused operators the layers call. One implementation is chosen at load: `torch_ops` (any device) or `native_ops`
(bf16 on CPUs with AVX-512 BF16). Results of a row never depend on the other rows where the implementation says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor


class PackedLinear(Protocol):
    """A weight in the layout its implementation computes fastest with. The original can be freed."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] → [rows, out_features], x's dtype; bias added when there is one."""
        ...


class Unread(Protocol):
    """A weight [rows, columns] that is still in its file, to be read once. Whoever packs it piece by piece never has it
    in memory beside its packed form."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def pieces(self) -> Iterator[Tensor]:
        """Its rows in order, some [rows, columns] at a time, on the CPU. The next piece overwrites the last."""
        ...

    def whole(self) -> Tensor:
        """On the model's device."""
        ...


Weight = Tensor | Unread


def pieces_of(weight: Weight) -> Iterable[Tensor]:
    """Its rows in order, some at a time."""
    return (weight,) if isinstance(weight, Tensor) else weight.pieces()


def whole(weight: Weight) -> Tensor:
    """All of it at once."""
    return weight if isinstance(weight, Tensor) else weight.whole()


Elementwise = Callable[[Tensor], Tensor]
"""[rows, features] → the same; each number by itself, in x's dtype."""

Lookup = Callable[[Tensor], Tensor]
"""Row numbers [rows] int64 → those rows of a table [rows, features]."""


class Ops(Protocol):
    name: str

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        """weight [out_features, in_features], bias [out_features] or None."""
        ...

    def pack_tied(self, weight: Weight) -> tuple[PackedLinear, Lookup]:
        """A head without bias, and the embedding whose table is the same weight; held once where that is possible."""
        ...

    def pack_gate_up(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        """weight [2 * dim, in_features], gate first. The layer returns silu(gate(x)) * up(x) [rows, dim]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [rows, dim]; statistics in float32, rounded to the weight's dtype before it is applied (as Llama does)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual)."""
        ...

    def rotate(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotary embedding in place, halves convention (GPT-NeoX style). queries [rows, heads, head_dim] and keys
        [rows, kv_heads, head_dim] may be strided views of one fused qkv tensor (last dim contiguous); cos, sin
        [max positions, rotary_dim / 2] float32."""
        ...

    def elementwise(self, function: Elementwise) -> Elementwise:
        """The function, which sees each number of [rows, features] alone, in the fastest form there is for it. Features
        are contiguous; rows may lie apart."""
        ...

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * dim] (gate first) → silu(gate) * up [rows, dim]."""
        ...
