"""The table of a model's parameters: the full shape of each, and which part of it a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_server.layers.embedding import Embedding
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.norm import NormSpec, norm_parameters
from penstock_server.models.image_layer import ImageLayer
from penstock_server.models.layer import layer_parameters
from penstock_server.models.mtp import MtpLayer
from penstock_server.models.pooler import Classifier
from penstock_server.models.spec import LayerSpec, ModelSpec
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


def parameters(spec: ModelSpec, layout: WeightLayout) -> dict[str, Parameter]:
    """By our names, which `NameMap` translates to the checkpoint's. A tied head has no weight of its own."""
    vocab, hidden_size = Part(0, layout.shard.vocab.mine), layout.shard.hidden_size
    table = Embedding.parameters(spec.embedding, layout)
    if spec.classifier is not None:
        table |= Classifier.parameters(spec.classifier, hidden_size)
    if spec.pooling is None and not spec.head.tied:
        in_features = spec.embedding.size or hidden_size
        shape, is_dense = (spec.vocab_size, in_features), spec.head.is_normalized
        table |= layout.linear("head", shape, bias=spec.head.bias, part=vocab, is_dense=is_dense)
    elif spec.pooling is None and spec.head.bias:
        table["head.bias"] = Parameter((spec.vocab_size,), vocab)
    if spec.pooling is None and spec.head.logits_bias:
        table["head.logits_bias"] = Parameter((1, spec.vocab_size), Part(1, vocab.range))
    table |= _stack_parameters(spec.layers, spec.final_norm, "", layout)
    for number, (_, layer) in enumerate(spec.image_layers):
        table |= ImageLayer.parameters(layer, f"image_layers.{number}", layout)
    if spec.image_layers:
        table["image_token.weight"] = Parameter((1, hidden_size))
    if spec.mtp is not None:
        table |= MtpLayer.parameters(spec.mtp, spec.mtp_prefix, layout)
    if spec.encoder is not None:
        table |= Embedding.parameters(spec.encoder.embedding, layout)
        table |= _stack_parameters(spec.encoder.layers, spec.encoder.final_norm, "encoder.", layout)
    return table


def _stack_parameters(
    layers: Iterable[LayerSpec], final_norm: NormSpec | None, prefix: str, layout: WeightLayout
) -> dict[str, Parameter]:
    table: dict[str, Parameter] = {}
    if final_norm is not None:
        table |= norm_parameters(f"{prefix}norm", final_norm, (layout.shard.hidden_size,))
    for index, layer in enumerate(layers):
        table |= layer_parameters(layer, f"{prefix}layers.{index}", layout)
    return table
