"""What the parts of a model are built from: the loader, the operators, this rank's share, and what layers share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from penstock_server.attention import choose_attention
from penstock_server.attention.interface import Attention, AttentionShape
from penstock_server.kernels.ops import Ops
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.layers.rope import RopeSpec, rope_tables
from penstock_server.layers.shard import Shard
from penstock_server.weights.loader import Loader


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Layers with the same attention share its implementation, and those with the same rope or bias its tables."""

    loader: Loader
    ops: Ops
    shard: Shard
    hidden_size: int
    max_position_tokens: int
    block_tokens: int
    attentions: dict[AttentionShape, Attention] = field(default_factory=dict)
    ropes: dict[RopeSpec, tuple[Tensor, Tensor]] = field(default_factory=dict)
    relative_biases: dict[RelativeBiasSpec, Tensor] = field(default_factory=dict)

    def attention(self, shape: AttentionShape) -> Attention:
        if shape not in self.attentions:
            self.attentions[shape] = choose_attention(shape, self.loader.device, self.loader.dtype)
        return self.attentions[shape]

    def rope(self, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        """Cosines and sines [max positions, rotary_dim / 2] float32."""
        if spec not in self.ropes:
            self.ropes[spec] = rope_tables(spec, self.max_position_tokens, self.loader.device)
        return self.ropes[spec]

    def relative_bias(self, spec: RelativeBiasSpec) -> Tensor:
        """[heads on this rank, distances] float32."""
        if spec not in self.relative_biases:
            self.relative_biases[spec] = spec.load(self.loader)
        return self.relative_biases[spec]
