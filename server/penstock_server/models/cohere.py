"""Cohere's Command R: attention and MLP in parallel after one LayerNorm without bias, interleaved rope.

In Command R7B and Command A, three of four layers have a sliding window; the fourth has full attention without rope."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models.config import Config
from penstock_server.models.llama import NAMES, llama_attention, llama_mlp, llama_model, num_layers
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap


def cohere(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rope_theta=500000.0)
    norm = _norm(config)
    qk_norm = QkNormSpec(norm, over="heads") if config.get("use_qk_norm", False) else None
    layer = _layer(config, replace(_attention(config), qk_norm=qk_norm))
    return _model(config, "cohere", (layer,) * num_layers(config)), NAMES


def cohere2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(sliding_window=4096)
    attention = _attention(config)
    has_window = config.values["sliding_window"] is not None
    rope = attention.rope if has_window else None
    kinds = {
        "full_attention": _layer(config, replace(attention, rope=None)),
        "sliding_attention": _layer(config, replace(attention, rope=rope, mask=AttentionMask(config.window()))),
    }
    pattern = config.get("sliding_window_pattern", 4)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers(config))]
    return _model(config, "cohere2", tuple(kinds[kind] for kind in config.layer_types(default))), NAMES


def _norm(config: Config) -> NormSpec:
    return NormSpec("layer", config.get("layer_norm_eps", 1e-5))


def _attention(config: Config) -> AttentionSpec:
    bias = config.get("attention_bias", False)
    return llama_attention(config, qkv_bias=bias, output_bias=bias, interleaved=True)


def _layer(config: Config, attention: AttentionSpec) -> LayerSpec:
    return LayerSpec(attention, llama_mlp(config), _norm(config), parallel=True, shares_norm=True)


def _model(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    spec = llama_model(config, architecture, layers, tied=True)
    return replace(spec, head=replace(spec.head, multiplier=config.get("logit_scale", 0.0625)))
