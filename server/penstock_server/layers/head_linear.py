"""A matrix for each attention head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock_server.device.ops import HeadProduct, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import DenseWeights
from penstock_server.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A matrix per head."""

    out_features: int  # output features of a head
    linears: Sequence[PackedLinear]  # one per head, unless there is a product
    product: HeadProduct | None  # with the matrices of all heads
    sites: range | None = None  # adapter sites, one for each head

    @classmethod
    def pack(cls, weight: Tensor, sites: range | None, context: BuildContext) -> HeadLinear:
        """weight [heads, out, in]"""
        product = context.ops.pack_heads(weight)
        linears = [] if product else [DenseWeights(head.contiguous()).pack(context.ops) for head in weight]
        return cls(weight.shape[1], linears, product, sites)

    def __call__(self, x: Tensor, out: Tensor, step: StepContext) -> None:
        """[rows, heads, in] → out [rows, heads, out]"""
        if self.product is not None:
            self.product(x, out)
        for head, linear in enumerate(self.linears):
            out[:, head] = linear(x[:, head])
        if self.sites is not None:
            step.add_adapters(self.sites.start, x, out)
