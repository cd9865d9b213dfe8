"""The table of a model's parameters: the full shape of each, and which part of it a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_server.layers.embedding import Embedding
from penstock_server.layers.norm import NormSpec, norm_parameters
from penstock_server.layers.shard import Shard
from penstock_server.models.layer import layer_parameters
from penstock_server.models.spec import LayerSpec, ModelSpec
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


def parameters(spec: ModelSpec, shard: Shard) -> dict[str, Parameter]:
    """Our names, as `NameMap` translates them. A tied head has no parameter of its own."""
    table = Embedding.parameters(spec.embedding, spec.hidden_size, shard)
    if not spec.head.tied:
        table["head.weight"] = table["embedding.weight"]
        if spec.head.bias:
            table["head.bias"] = Parameter((spec.vocab_size,), Part(0, shard.vocab.mine))
    if spec.head.logits_bias:
        table["head.logits_bias"] = Parameter((1, spec.vocab_size), Part(1, shard.vocab.mine))
    table |= _stack_parameters(spec.layers, spec.final_norm, "", spec.hidden_size, shard)
    if spec.encoder is not None:
        encoder = spec.encoder
        table |= Embedding.parameters(encoder.embedding, spec.hidden_size, shard)
        table |= _stack_parameters(encoder.layers, encoder.final_norm, "encoder.", spec.hidden_size, shard)
    return table


def _stack_parameters(
    layers: Iterable[LayerSpec], final_norm: NormSpec | None, prefix: str, hidden_size: int, shard: Shard
) -> dict[str, Parameter]:
    table: dict[str, Parameter] = {}
    if final_norm is not None:
        table |= norm_parameters(f"{prefix}norm", final_norm, (hidden_size,))
    for index, layer in enumerate(layers):
        table |= layer_parameters(layer, f"{prefix}layers.{index}", hidden_size, shard)
    return table
