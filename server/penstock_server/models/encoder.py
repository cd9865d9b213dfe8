"""The encoder in front of a decoder. Its output for a step's sources is written, as keys and values of the
cross-attention, to the cache of every decoder layer.

While the encoder's own layers run, their keys and values use the cache of the decoder's first layer, at the source's
slots. So encoder attention runs over the same paged cache and needs no memory of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock_server.device.ops import Lookup
from penstock_server.layers.context import BuildContext
from penstock_server.layers.embedding import Embedding
from penstock_server.layers.executor import executor_of
from penstock_server.layers.norm import load_norm
from penstock_server.layers.operation import Program
from penstock_server.layers.step import StepContext
from penstock_server.models.layer import Layer
from penstock_server.models.spec import EncoderSpec


class Encoder:
    """A loaded encoder on one rank."""

    def __init__(self, spec: EncoderSpec, lookup: Lookup, context: BuildContext) -> None:
        self.embedding = Embedding.load(spec.embedding, lookup, context)
        self.layers = [Layer.load(layer, f"encoder.layers.{index}", context) for index, layer in enumerate(spec.layers)]
        norm = None
        if spec.final_norm is not None:
            norm = load_norm(context.loader, context.ops, "encoder.norm", spec.final_norm)
        program = Program(context.shard.hidden_size)
        for layer in self.layers:
            layer.append_to(program, is_last=layer is self.layers[-1])
        program.output(norm)
        self.executor = executor_of(program, context.ops, "encoder layers")

    def read(self, sources: StepContext, layers: list[Layer], caches: list[Tensor]) -> None:
        """Encodes the sources, and writes their keys and values to the caches of these decoder layers."""
        states = self._states(sources, caches[0])
        for layer, cache in zip(layers, caches, strict=True):
            assert layer.cross is not None
            layer.cross.store(states, cache, sources.batch.slots)

    def _states(self, sources: StepContext, cache: Tensor) -> Tensor:
        """The encoder's output [tokens, hidden] of the sources."""
        residual = self.embedding(sources)
        every_row = torch.arange(len(residual), device=residual.device)
        step = StepContext(replace(sources.batch, sample_rows=every_row), sources.metadata)
        return self.executor.run(residual, [cache] * len(self.layers), step)
