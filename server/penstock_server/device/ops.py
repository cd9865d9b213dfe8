"""The fused operators that layers call. One implementation is selected at load: `torch_ops` (any device), `native_ops`
(CPUs), `triton_ops` or `triton_invariant` (CUDA). `native_ops` and `triton_invariant` compute a row alike whatever the
other rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock_server.device.quantized import Kept, QuantizedMatrix
from penstock_server.device.state import Recurrence, StateRows


class PackedLinear(Protocol):
    """A dense weight in the layout that its implementation computes fastest with. It does not refer to the original."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] → [rows, out_features] in x's dtype, bias included."""
        ...


class PackedNorm(Protocol):
    """A norm with its parameters."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of x [rows, dim] or [rows, heads, dim], whose last dimension is contiguous. It has x's dtype,
        or the weight's if that is narrower.

        With a residual, both are [rows, dim]: x is added to it in place, and the result is the norm of the sum."""
        ...


@dataclass(frozen=True, slots=True)
class Summand:
    """What is to be added to a residual: norm(x) * factor + other. All are [rows, dim]."""

    x: Tensor
    norm: PackedNorm | None = None
    factor: float = 1.0
    other: Tensor | None = None

    def value(self) -> Tensor:
        value = self.x if self.norm is None else self.norm(self.x)
        if self.factor != 1.0:
            value = value * self.factor
        return value if self.other is None else self.other + value

    def add_to(self, residual: Tensor, norm: PackedNorm | None) -> Tensor:
        """Like `Ops.add`, with the norms' own operators."""
        if norm is not None:
            return norm(self.value(), residual)
        residual += self.value()
        return residual


class LazyWeight(Protocol):
    """A weight [rows, columns] that is still in its file. It can be read once; read in pieces, it is never in memory as
    a whole next to its packed form."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def pieces(self) -> Iterator[Tensor]:
        """Its rows in order, as pieces [some rows, columns] on the CPU. The next piece overwrites the last."""
        ...

    def whole(self) -> Tensor:
        """[rows, columns], on the model's device."""
        ...


Weight = Tensor | LazyWeight


def pieces_of(weight: Weight) -> Iterable[Tensor]:
    """Its rows in order, as pieces [some rows, columns]."""
    return (weight,) if isinstance(weight, Tensor) else weight.pieces()


def whole(weight: Weight) -> Tensor:
    """[rows, columns]"""
    return weight if isinstance(weight, Tensor) else weight.whole()


NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class NormVariant:
    """Statistics are in float32. LayerNorm, and RMSNorm with `is_wide`, round once, at the end; other RMSNorms round
    before the weight is applied too (as in Llama)."""

    eps: float
    kind: NormKind = "rms"
    is_wide: bool = False


def norm_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of a norm's result. A residual stream is float32 in some float16 models."""
    return x.dtype if weight.dtype == torch.float32 else weight.dtype


Elementwise = Callable[[Tensor], Tensor]
"""[rows, features] → the same shape and dtype, element by element."""

Lookup = Callable[[Tensor], Tensor]
"""Row numbers [rows] int64 → those rows of a table [rows, features]."""


class QuantizedPacker(Protocol):
    """Packs layers whose weights stay quantized."""

    def __call__(
        self, matrices: Sequence[QuantizedMatrix], bias: Tensor | None, *, gated: bool = False
    ) -> tuple[PackedLinear, Lookup]:
        """A layer whose weight is these matrices, one below the other, and its rows in the model's dtype. gated: as in
        `Ops.pack_gate_up`; such a layer has no rows to look up."""
        ...


class PackedRecurrence(Protocol):
    """What a layer that keeps a state computes between its projections."""

    @property
    def net(self) -> Recurrence: ...

    def __call__(self, inputs: Sequence[Tensor], slots: Tensor, of: StateRows) -> Tensor:
        """inputs: [rows, columns] of each of the net's `input_widths`; slots: [slots, `StateLayout.slot`] float32,
        which change → [rows, `output_width`]"""
        ...


HeadProduct = Callable[[Tensor, Tensor], None]
"""x [rows, heads, in] → out [rows, heads, out], by a matrix per head. The features of both are contiguous."""


class Ops(Protocol):
    name: str
    kept: Kept  # the quantized weights that `quantized_packer` takes
    groups_experts: bool  # whether experts are chosen and computed together, by `triton_grouped`
    adds_adapters: bool  # whether `triton_low_rank` adds adapters to the products of single layers

    @property
    def quantized_packer(self) -> QuantizedPacker | None:
        """None: there are no kernels for quantized weights, so they are dequantized at load."""
        ...

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        """weight [out_features, in_features], bias [out_features] or None."""
        ...

    def pack_wide(self, weight: Tensor) -> PackedLinear:
        """Like `pack_linear` without bias, but the result is float32, and not rounded to x's dtype before."""
        ...

    def pack_tied(self, weight: Weight) -> tuple[PackedLinear, Lookup]:
        """An output head without bias, and the embedding whose table is the same weight. It is held once if
        possible."""
        ...

    def pack_gate_up(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        """weight [2 * dim, in_features], gate first. The layer returns silu(gate(x)) * up(x) [rows, dim]."""
        ...

    def pack_heads(self, weight: Tensor) -> HeadProduct | None:
        """weight [heads, out, in]. None: there is no operator for all heads, only layers for each."""
        ...

    def pack_norm(self, weight: Tensor, bias: Tensor | None, variant: NormVariant) -> PackedNorm:
        """weight [dim], or [heads, dim] for a weight per head; bias the same or None."""
        ...

    def add(self, residual: Tensor, summand: Summand, norm: PackedNorm | None) -> Tensor:
        """Adds to the residual [rows, dim] in place, and returns the norm of the sum; without one, the sum."""
        ...

    def rotate(
        self,
        queries: Tensor,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        """Rotary embedding in place, of pairs in halves (GPT-NeoX) or of neighbours (GPT-J). queries [rows, heads,
        head_dim] and keys [rows, kv_heads, head_dim] may be strided views of one fused tensor with a contiguous last
        dimension; cos, sin [max positions, rotary_dim / 2] float32; positions [rows] int64."""
        ...

    def elementwise(self, function: Elementwise) -> Elementwise:
        """The function in its fastest form. It takes [rows, features] whose features are contiguous; rows may be
        strided."""
        ...

    def gated(self, activation: Elementwise) -> Elementwise:
        """[rows, 2 * dim], gate first → activation(gate) * up [rows, dim]."""
        ...

    def pack_recurrence(self, net: Recurrence) -> PackedRecurrence: ...
