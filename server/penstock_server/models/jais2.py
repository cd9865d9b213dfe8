"""Jais 2: Llama with LayerNorms, biases in every layer, and an ungated MLP with squared ReLU."""

from __future__ import annotations

from penstock_server.layers.norm import NormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap


def jais2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(hidden_act="relu2")
    bias = config.get("attention_bias", True)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    mlp = llama.llama_mlp(config, gated=False, bias=config.get("mlp_bias", True))
    layer = LayerSpec(attention, mlp, NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True))
    return llama.llama_model(config, "jais2", (layer,) * llama.num_layers(config)), llama.NAMES
