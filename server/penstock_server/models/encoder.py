"""The encoder before a decoder: what it makes of a step's sources goes into the cache of every layer of the decoder.

While its own layers run, their keys and values stand where the decoder's first layer has the source's later on: in the
first cache, at the source's slots. So encoders attend as decoders do, and need no memory of their own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock_server.attention.interface import StepBatch
from penstock_server.kernels.ops import Lookup
from penstock_server.layers.context import BuildContext
from penstock_server.layers.embedding import Embedding
from penstock_server.layers.norm import Norm
from penstock_server.models.layer import Layer, Stream
from penstock_server.models.spec import EncoderSpec


class Encoder:
    """A loaded encoder on one rank."""

    def __init__(self, spec: EncoderSpec, lookup: Lookup, context: BuildContext) -> None:
        self.embedding = Embedding.load(spec.embedding, lookup, context)
        self.layers = [Layer.load(layer, f"encoder.layers.{index}", context) for index, layer in enumerate(spec.layers)]
        self.norm = None
        if spec.final_norm is not None:
            self.norm = Norm.load(context.loader, context.ops, "encoder.norm", spec.final_norm)

    def read(self, sources: StepBatch, layers: list[Layer], caches: list[Tensor]) -> None:
        """Writes the sources' keys and values into the caches of the decoder's layers."""
        stream = Stream(self.embedding(sources))
        for layer in self.layers:
            layer.run(stream, caches[0], sources, None)
        states = stream.enter(self.norm)
        for layer, cache in zip(layers, caches, strict=True):
            assert layer.cross is not None
            layer.cross.store(states, cache, sources.slots)


def split(batch: StepBatch) -> tuple[StepBatch | None, StepBatch | None]:
    """A step's sources, and what stands behind sources; None where there is nothing. Positions in the latter count from
    an answer's beginning; its `sample_rows` are those of the batch."""
    assert batch.source_lens is not None
    counts = batch.query_starts.diff()
    of_source = (batch.source_lens - batch.context_lens + counts).clamp(min=0).minimum(counts)
    source_of_row = batch.source_lens.repeat_interleave(counts)
    is_source = batch.positions < source_of_row
    rows = torch.arange(len(is_source), device=is_source.device)
    nothing = batch.sample_rows[:0]
    sources = _part(batch, rows[is_source], of_source, nothing)
    if sources is not None:
        assert sources.source_lens is not None
        sources = replace(sources, context_lens=sources.source_lens)
    place = (~is_source).cumsum(0) - 1  # of each row among the answers'
    answers = _part(batch, rows[~is_source], counts - of_source, place[batch.sample_rows])
    if answers is not None:
        answers = replace(answers, positions=answers.positions - source_of_row[~is_source])
    return sources, answers


def _part(batch: StepBatch, rows: Tensor, counts: Tensor, sample_rows: Tensor) -> StepBatch | None:
    """These rows of a batch, so many of each sequence."""
    if len(rows) == 0:
        return None
    assert batch.source_lens is not None
    here = counts > 0
    starts = torch.nn.functional.pad(counts[here].cumsum(0), (1, 0)).to(batch.query_starts.dtype)
    return StepBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=starts,
        context_lens=batch.context_lens[here],
        block_tables=batch.block_tables[here],
        sample_rows=sample_rows,
        max_query_tokens=int(counts.max()),
        max_context_tokens=batch.max_context_tokens,
        source_lens=batch.source_lens[here],
    )
