"""Nemotron and Minitron: LayerNorm weights with an offset of 1, an ungated MLP with squared ReLU, rope in half of each
head."""

from __future__ import annotations

from penstock_server.layers.norm import NormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap


def nemotron(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: early configurations have rope_percent.
    partial = config.get("rope_percent", 0.5)
    config = config.with_defaults(hidden_act="relu2", partial_rotary_factor=partial)
    bias = config.get("attention_bias", False)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    mlp = llama.llama_mlp(config, gated=False, bias=config.get("mlp_bias", False))
    layer = LayerSpec(attention, mlp, NormSpec("layer", config.get("norm_eps", 1e-5), bias=True, offset=1.0))
    return llama.llama_model(config, "nemotron", (layer,) * llama.num_layers(config)), llama.NAMES
