"""The table of a decoder's parameters: the full shape of each, and which part of it a rank holds."""

from __future__ import annotations

from penstock_server.layers.embedding import Embedding
from penstock_server.layers.norm import norm_parameters
from penstock_server.layers.shard import Shard
from penstock_server.models.layer import layer_parameters
from penstock_server.models.spec import ModelSpec
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


def parameters(spec: ModelSpec, shard: Shard) -> dict[str, Parameter]:
    """Our names, as `NameMap` translates them. A tied head has no parameter of its own."""
    table = Embedding.parameters(spec.embedding, spec.hidden_size, shard)
    if not spec.head.tied:
        table["head.weight"] = table["embedding.weight"]
        if spec.head.bias:
            table["head.bias"] = Parameter((spec.vocab_size,), Part(0, shard.vocab.mine))
    if spec.final_norm is not None:
        table |= norm_parameters("norm", spec.final_norm, (spec.hidden_size,))
    for index, layer in enumerate(spec.layers):
        table |= layer_parameters(layer, f"layers.{index}", spec.hidden_size, shard)
    return table
