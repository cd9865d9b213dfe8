"""From token ids to the first layer's input: token embedding, scale, projection, positions, norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock_server.device.ops import Lookup, PackedLinear, PackedNorm
from penstock_server.layers.context import BuildContext
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.norm import NormSpec, load_norm, norm_parameters
from penstock_server.layers.step import StepContext
from penstock_server.layers.vocabulary import VocabularyEmbedding
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    vocab_size: int
    size: int | None = None  # size of a token's embedding, if it is projected to and from the hidden size (OPT-350m)
    multiplier: float = 1.0
    multiplier_is_rounded: bool = False  # to the model's dtype before it is applied (Gemma)
    num_positions: int = 0  # rows of the position table; 0: no table
    position_offset: int = 0  # the table's row of position 0 (2 in OPT)
    num_types: int = 0  # rows of the table of token types (BERT)
    # If set, positions are not learned but sinusoids of position * 10000^(-i / this), for i below half the hidden size.
    sinusoid_steps: float | None = None
    norm: NormSpec | None = None  # BLOOM
    is_wide: bool = False  # in float32 if the model is float16, whose range the sums of layers exceed (T5)
    prefix: str = ""  # prefix of its parameters, except for the token table, which encoder and decoder share


@dataclass(frozen=True, slots=True)
class Embedding:
    spec: EmbeddingSpec
    tokens: VocabularyEmbedding
    multiplier: float
    project: PackedLinear | None
    positions: Tensor | None  # [num_positions, hidden]
    types: Tensor | None  # [num_types, hidden]
    norm: PackedNorm | None
    site: int | None = None  # adapter site of the token embeddings

    @staticmethod
    def parameters(spec: EmbeddingSpec, layout: WeightLayout) -> dict[str, Parameter]:
        hidden_size = layout.shard.hidden_size
        size = spec.size or hidden_size
        table = layout.linear("embedding", (spec.vocab_size, size), part=Part(0, layout.shard.vocab.mine))
        if size != hidden_size:
            table |= layout.linear("project_in", (hidden_size, size))
            table |= layout.linear("project_out", (size, hidden_size))
        if spec.num_positions and spec.sinusoid_steps is None:
            table[f"{spec.prefix}positions.weight"] = Parameter((spec.num_positions, hidden_size))
        if spec.num_types:
            table[f"{spec.prefix}types.weight"] = Parameter((spec.num_types, hidden_size))
        if spec.norm is not None:
            table |= norm_parameters(f"{spec.prefix}embedding_norm", spec.norm, (hidden_size,))
        return table

    @classmethod
    def load(cls, spec: EmbeddingSpec, lookup: Lookup, context: BuildContext) -> Embedding:
        """lookup: the token table on this rank."""
        loader, shard = context.loader, context.shard
        multiplier = spec.multiplier
        if spec.multiplier_is_rounded:
            multiplier = float(torch.tensor(multiplier, dtype=loader.dtype))
        norm = None
        if spec.norm is not None:
            norm = load_norm(loader, context.ops, f"{spec.prefix}embedding_norm", spec.norm)
        positions = loader.read_if_there(f"{spec.prefix}positions.weight")
        if spec.sinusoid_steps is not None:
            positions = sinusoids(spec.num_positions, shard.hidden_size, spec.sinusoid_steps)
            positions = positions.to(loader.dtype).to(loader.device)
        return cls(
            spec=spec,
            tokens=VocabularyEmbedding(lookup, shard.vocab.mine, shard.group),
            multiplier=multiplier,
            project=context.linear("project_in") if spec.size not in (None, shard.hidden_size) else None,
            positions=positions,
            types=loader.read_if_there(f"{spec.prefix}types.weight"),
            norm=norm,
            site=None if context.adapter_sites is None else context.adapter_sites.add_embedding(),
        )

    def __call__(self, step: StepContext) -> Tensor:
        """[tokens, hidden]. The caller owns the tensor and may write to it."""
        x = self.tokens(step.batch.token_ids)
        step.add_adapters(self.site, step.batch.token_ids, x)
        if self.multiplier != 1.0:
            x *= self.multiplier
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x += embedding(step.batch.positions + self.spec.position_offset, self.positions)
        if self.types is not None:
            types = step.batch.token_types
            x += self.types[0] if types is None else embedding(types, self.types)
        if self.spec.is_wide and x.dtype == torch.float16:
            x = x.float()
        return x if self.norm is None else self.norm(x)


def sinusoids(num_positions: int, size: int, steps: float) -> Tensor:
    """[positions, size] float64: all sines, then all cosines (https://arxiv.org/abs/1706.03762, section 3.5, where they
    are interleaved)."""
    frequencies = 10000 ** (-torch.arange(size // 2, dtype=torch.float64) / steps)
    angles = torch.arange(num_positions, dtype=torch.float64).outer(frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
