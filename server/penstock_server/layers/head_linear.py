"""A matrix for each attention head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock_server.kernels.ops import HeadProduct
from penstock_server.layers.adapter import add_adapters
from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import DenseWeights, Linear
from penstock_server.layers.step import StepContext

if TYPE_CHECKING:
    from penstock_server.kernels.triton_low_rank import LowRankSum


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A matrix per head."""

    out_features: int  # output features of a head
    linears: Sequence[Linear]  # one per head, unless there is a product
    product: HeadProduct | None  # with the matrices of all heads
    sites: range | None = None  # adapter sites, one for each head
    sum: LowRankSum | None = None  # what adapters add at these sites, where programs are interpreted

    @classmethod
    def pack(cls, weight: Tensor, sites: range | None, context: BuildContext) -> HeadLinear:
        """weight [heads, out, in]"""
        ops, low_rank = context.ops, context.sum_at(sites)
        product = ops.pack_heads(weight)
        linears = [] if product else [DenseWeights(head.contiguous()).pack(ops) for head in weight]
        return cls(weight.shape[1], linears, product, sites, low_rank)

    def __call__(self, x: Tensor, out: Tensor, step: StepContext) -> None:
        """[rows, heads, in] → out [rows, heads, out]"""
        if self.product is not None:
            self.product(x, out)
        for head, linear in enumerate(self.linears):
            out[:, head] = linear(x[:, head], step)
        if self.sum is not None:
            add_adapters(self.sum, x, out, step)
