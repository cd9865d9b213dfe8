"""Short convolutions in plain torch."""

from __future__ import annotations

from torch import Tensor

from penstock_server.device.reference.chunk import Chunk
from penstock_server.device.short_conv import ShortConv


def advance(net: ShortConv, inputs: list[Tensor], chunk: Chunk) -> Tensor:
    """The outputs [rows, channels] of rows of one chunk."""
    b, c, x = inputs[0].chunk(3, 1)
    chunk.rows[chunk.within :, : net.channels] = b * x
    return c * (chunk.convolved(net.conv) + net.bias)
