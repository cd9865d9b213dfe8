"""Layers that keep a state of each sequence in plain torch, which computes the rows of a chunk together. Native kernels
compute the same, row after row."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from penstock_server.device.gated_delta import GatedDelta
from penstock_server.device.mamba import MambaConv, MambaScan
from penstock_server.device.mamba2 import Mamba2
from penstock_server.device.reference import gated_delta, mamba, mamba2, short_conv
from penstock_server.device.reference.chunk import Chunk
from penstock_server.device.short_conv import ShortConv
from penstock_server.device.state import CHUNK_TOKENS, Recurrence, StateRows

_ADVANCES: dict[type, Callable[[Any, list[Tensor], Chunk], Tensor]] = {
    GatedDelta: gated_delta.advance,
    Mamba2: mamba2.advance,
    MambaConv: mamba.convolve,
    MambaScan: mamba.scan,
    ShortConv: short_conv.advance,
}


class TorchRecurrence:
    """Implements `PackedRecurrence`."""

    def __init__(self, net: Recurrence) -> None:
        self.net = net
        self._advance = _ADVANCES[type(net)]

    def __call__(self, inputs: Seq[Tensor], slots: Tensor, of: StateRows) -> Tensor:
        outputs = inputs[0].new_empty((len(inputs[0]), self.net.output_width))
        starts, ends, of_sequences = of.query_starts.tolist(), of.context_lens.tolist(), of.slots.tolist()
        for sequence, slot in enumerate(of_sequences):
            first, stop = starts[sequence], starts[sequence + 1]
            while first < stop:
                position = ends[sequence] - (stop - first)
                rows = slice(first, min(stop, first + CHUNK_TOKENS - position % CHUNK_TOKENS))
                chunk = Chunk(self.net.layout, slots[slot], position, rows.stop - first)
                outputs[rows] = self._advance(self.net, [each[rows].float() for each in inputs], chunk)
                first = rows.stop
        return outputs
