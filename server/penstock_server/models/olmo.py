"""OLMo 1: norms without weights. OLMo 2 and 3: norms after attention and MLP instead of before them, and norms over the
whole projections of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement

POST_NAMES = llama.NAMES | {
    "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
}


def olmo(config: Config) -> tuple[ModelSpec, NameMap]:
    bias = config.get("attention_bias", False)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    clip = config.get("clip_qkv", 0.0) or None
    norm = NormSpec("layer", 1e-5, unweighted_dim=config.require("hidden_size", int))
    layer = LayerSpec(replace(attention, clip=clip), llama.llama_mlp(config), norm)
    return llama.llama_model(config, "olmo", (layer,) * llama.num_layers(config)), llama.NAMES


def olmo2(config: Config) -> tuple[ModelSpec, NameMap]:
    norm = _norm(config)
    bias = config.get("attention_bias", False)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm, over="projection"))
    layer = replace(layer, norm=norm, placement=NormPlacement.POST)
    return llama.llama_model(config, "olmo2", (layer,) * llama.num_layers(config)), POST_NAMES


def olmo3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rope_theta=500000.0, sliding_window=4096)
    norm, bias = _norm(config), config.get("attention_bias", False)
    kinds = {}
    for kind, window in (("full_attention", None), ("sliding_attention", config.window())):
        attention = llama.llama_attention(
            config,
            qkv_bias=bias,
            output_bias=bias,
            mask=AttentionMask(window),
            qk_norm=QkNormSpec(norm, over="projection"),
            layer_type=kind,
        )
        kinds[kind] = LayerSpec(attention, llama.llama_mlp(config), norm, placement=NormPlacement.POST)
    num = llama.num_layers(config)
    default = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(num)]
    return llama.llama_model(config, "olmo3", tuple(kinds[kind] for kind in config.layer_types(default))), POST_NAMES


def _norm(config: Config) -> NormSpec:
    return NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True)
