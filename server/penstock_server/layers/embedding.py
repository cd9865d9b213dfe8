"""From token ids to what the first layer gets: the tokens' embedding, then scale, projection, positions and a norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock_server.attention.interface import StepBatch
from penstock_server.kernels.ops import Lookup, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.norm import Norm, NormSpec, norm_parameters
from penstock_server.layers.shard import Shard
from penstock_server.layers.vocabulary import VocabularyEmbedding
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    vocab_size: int
    size: int | None = None  # of a token's vector where it is not the hidden size: projected in and out (OPT-350m)
    multiplier: float = 1.0
    multiplier_is_rounded: bool = False  # to the model's dtype before it is applied (Gemma)
    num_positions: int = 0  # rows of the table of positions; 0: none
    position_offset: int = 0  # the row of position 0 (2 in OPT)
    # Positions are not learned, but sines of position * 10000^(-i / this) for i of half the hidden size, then cosines.
    sinusoid_steps: float | None = None
    norm: NormSpec | None = None  # BLOOM
    is_wide: bool = False  # in float32 where float16 is too narrow for what the layers add (T5)
    prefix: str = ""  # of its parameters but the tokens' table, which an encoder and its decoder share


@dataclass(frozen=True, slots=True)
class Embedding:
    spec: EmbeddingSpec
    tokens: VocabularyEmbedding
    multiplier: float
    project: PackedLinear | None
    positions: Tensor | None  # [num_positions, hidden]
    norm: Norm | None

    @staticmethod
    def parameters(spec: EmbeddingSpec, hidden_size: int, shard: Shard) -> dict[str, Parameter]:
        size = spec.size or hidden_size
        table = {"embedding.weight": Parameter((spec.vocab_size, size), Part(0, shard.vocab.mine))}
        if size != hidden_size:
            table["project_in.weight"] = Parameter((hidden_size, size))
            table["project_out.weight"] = Parameter((size, hidden_size))
        if spec.num_positions and spec.sinusoid_steps is None:
            table[f"{spec.prefix}positions.weight"] = Parameter((spec.num_positions, hidden_size))
        if spec.norm is not None:
            table |= norm_parameters(f"{spec.prefix}embedding_norm", spec.norm, (hidden_size,))
        return table

    @classmethod
    def load(cls, spec: EmbeddingSpec, lookup: Lookup, context: BuildContext) -> Embedding:
        """All but the token table, which comes as `lookup`."""
        loader, shard = context.loader, context.shard
        project = loader.read_if_there("project_in.weight")
        multiplier = spec.multiplier
        if spec.multiplier_is_rounded:
            multiplier = float(torch.tensor(multiplier, dtype=loader.dtype))
        norm = None
        if spec.norm is not None:
            norm = Norm.load(loader, context.ops, f"{spec.prefix}embedding_norm", spec.norm)
        positions = loader.read_if_there(f"{spec.prefix}positions.weight")
        if spec.sinusoid_steps is not None:
            positions = sinusoids(spec.num_positions, context.hidden_size, spec.sinusoid_steps)
            positions = positions.to(loader.dtype).to(loader.device)
        return cls(
            spec=spec,
            tokens=VocabularyEmbedding(lookup, shard.vocab.mine, shard.group),
            multiplier=multiplier,
            project=None if project is None else context.ops.pack_linear(project, None),
            positions=positions,
            norm=norm,
        )

    def __call__(self, batch: StepBatch) -> Tensor:
        """[tokens, hidden], the caller's to write to."""
        x = self.tokens(batch.token_ids)
        if self.multiplier != 1.0:
            x *= self.multiplier
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x += embedding(batch.positions + self.spec.position_offset, self.positions)
        if self.spec.is_wide and x.dtype == torch.float16:
            x = x.float()
        return x if self.norm is None else self.norm(x)


def sinusoids(num_positions: int, size: int, steps: float) -> Tensor:
    """[positions, size], float64 (https://arxiv.org/abs/1706.03762, section 3.5, sines and cosines not interleaved)."""
    frequencies = 10000 ** (-torch.arange(size // 2, dtype=torch.float64) / steps)
    angles = torch.arange(num_positions, dtype=torch.float64).outer(frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
