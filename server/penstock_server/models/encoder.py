"""The encoder in front of a decoder. Its output for a step's sources is written, as keys and values of the
cross-attention, to the cache of every decoder layer.

While the encoder's own layers run, their keys and values use the cache of the decoder's first layer, at the source's
slots. So encoder attention runs over the same paged cache and needs no memory of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock_server.attention.interface import StepBatch
from penstock_server.kernels.ops import Lookup
from penstock_server.layers.context import BuildContext
from penstock_server.layers.embedding import Embedding
from penstock_server.layers.norm import load_norm
from penstock_server.layers.step import StepContext
from penstock_server.models.layer import Layer, ResidualStream
from penstock_server.models.spec import EncoderSpec


class Encoder:
    """A loaded encoder on one rank."""

    def __init__(self, spec: EncoderSpec, lookup: Lookup, context: BuildContext) -> None:
        self.embedding = Embedding.load(spec.embedding, lookup, context)
        self.layers = [Layer.load(layer, f"encoder.layers.{index}", context) for index, layer in enumerate(spec.layers)]
        self.norm = None
        if spec.final_norm is not None:
            self.norm = load_norm(context.loader, context.ops, "encoder.norm", spec.final_norm)

    def read(self, sources: StepContext, layers: list[Layer], caches: list[Tensor]) -> None:
        """Encodes the sources, and writes their keys and values to the caches of these decoder layers."""
        stream = ResidualStream(self.embedding(sources))
        for layer in self.layers:
            layer.run(stream, caches[0], sources, None)
        states = stream.enter(self.norm)
        for layer, cache in zip(layers, caches, strict=True):
            assert layer.cross is not None
            layer.cross.store(states, cache, sources)


def split(batch: StepBatch) -> tuple[StepBatch | None, StepBatch | None]:
    """The step's source tokens, and the tokens after the sources; None if there are none. The positions of the latter
    count from the beginning of the answer, and their `sample_rows` are those of the whole batch."""
    assert batch.source_lens is not None
    counts = batch.query_starts.diff()
    num_source = (batch.source_lens - batch.context_lens + counts).clamp(min=0).minimum(counts)  # [sequences]
    source_len_of_row = batch.source_lens.repeat_interleave(counts)
    is_source = batch.positions < source_len_of_row
    rows = torch.arange(len(is_source), device=is_source.device)
    sources = _part(batch, rows[is_source], num_source, batch.sample_rows[:0])
    if sources is not None:
        assert sources.source_lens is not None
        sources = replace(sources, context_lens=sources.source_lens)
    answer_row = (~is_source).cumsum(0) - 1  # of each row of the batch
    answers = _part(batch, rows[~is_source], counts - num_source, answer_row[batch.sample_rows])
    if answers is not None:
        answers = replace(answers, positions=answers.positions - source_len_of_row[~is_source])
    return sources, answers


def _part(batch: StepBatch, rows: Tensor, counts: Tensor, sample_rows: Tensor) -> StepBatch | None:
    """The batch of these rows. counts [sequences]: how many of them each sequence has."""
    if len(rows) == 0:
        return None
    assert batch.source_lens is not None
    has_rows = counts > 0
    starts = torch.nn.functional.pad(counts[has_rows].cumsum(0), (1, 0)).to(batch.query_starts.dtype)
    return StepBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=starts,
        context_lens=batch.context_lens[has_rows],
        block_tables=batch.block_tables[has_rows],
        sample_rows=sample_rows,
        max_query_tokens=int(counts.max()),
        max_context_tokens=batch.max_context_tokens,
        source_lens=batch.source_lens[has_rows],
    )
