"""Granite: Llama with multipliers of the embedding, the scores, the output of each part, and the logits."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, Multipliers, NameMap


def granite(config: Config) -> tuple[ModelSpec, NameMap]:
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(
        replace(attention, scale=config.get("attention_multiplier", 1.0)),
        llama.llama_mlp(config, bias=mlp_bias),
        llama.rms_norm(config),
        multipliers=multipliers(config),
    )
    spec = llama.llama_model(config, "granite", (layer,) * llama.num_layers(config))
    spec = replace(
        spec,
        embedding=replace(spec.embedding, multiplier=config.get("embedding_multiplier", 1.0)),
        head=replace(spec.head, multiplier=1.0 / config.get("logits_scaling", 1.0)),
    )
    return spec, llama.NAMES


def multipliers(config: Config) -> Multipliers:
    factor = config.get("residual_multiplier", 1.0)
    return Multipliers(attention=factor, mlp=factor)
