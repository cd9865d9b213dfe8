"""OLMo 2: norms behind attention and MLP instead of before them, and over whole projections of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap, Placement

NAMES = replace(
    llama.NAMES,
    names={
        **llama.NAMES.names,
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
)


def olmo2(config: Config) -> tuple[ModelSpec, NameMap]:
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True)
    bias = config.get("attention_bias", False)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm, over="projection"))
    layer = replace(layer, norm=norm, placement=Placement.POST)
    return llama.llama_model(config, "olmo2", (layer,) * llama.num_layers(config)), NAMES
