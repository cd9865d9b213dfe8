"""Gemma 1, 2 and 3 (text): norm weights with an offset of 1; in 2 and 3 norms before and after each part, sliding
windows on some layers, and soft caps."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.layers.rope import RopeSpec
from penstock_server.models.config import Config
from penstock_server.models.llama import NAMES, llama_model, num_layers
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement

BOTH_NAMES = NAMES | {
    "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
}


def gemma(config: Config) -> tuple[ModelSpec, NameMap]:
    head_dim = config.get("head_dim", 256)
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    layer = _layer(config, _attention(config, head_dim, head_dim, read_rope(config, head_dim)), activation)
    return _model(config, "gemma", (layer,) * num_layers(config)), NAMES


def gemma2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=4)
    head_dim = config.get("head_dim", 256)
    attention = _attention(config, head_dim, config.get("query_pre_attn_scalar", 256.0), read_rope(config, head_dim))
    attention = replace(attention, soft_cap=_soft_cap(config, "attn_logit_softcapping", 50.0))
    layer = replace(_layer(config, attention), placement=NormPlacement.BOTH)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(config))]
    window = config.with_defaults(sliding_window=4096).window()
    layers = tuple(
        replace(layer, attention=replace(attention, mask=AttentionMask(window)))
        if kind == "sliding_attention"
        else layer
        for kind in config.layer_types(alternating)
    )
    return _model(config, "gemma2", layers, _soft_cap(config, "final_logit_softcapping", 30.0)), BOTH_NAMES


def gemma3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=4)
    head_dim = config.get("head_dim", 256)
    scale_dim = config.get("query_pre_attn_scalar", 256.0)
    kinds = {}
    window = config.with_defaults(sliding_window=4096).window()
    for kind, key, theta, width in (
        ("full_attention", "rope_theta", 1e6, None),
        ("sliding_attention", "rope_local_base_freq", 1e4, window),
    ):
        rope = read_rope(config, head_dim, default_theta=theta, theta_key=key, layer_type=kind)
        attention = replace(
            _attention(config, head_dim, scale_dim, rope),
            mask=AttentionMask(width),
            qk_norm=QkNormSpec(_norm(config)),
            soft_cap=_soft_cap(config, "attn_logit_softcapping", None),
        )
        kinds[kind] = replace(_layer(config, attention), placement=NormPlacement.BOTH)
    pattern = config.get("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers(config))]
    layers = tuple(kinds[kind] for kind in config.layer_types(default))
    return _model(config, "gemma3_text", layers, _soft_cap(config, "final_logit_softcapping", None)), BOTH_NAMES


def _norm(config: Config) -> NormSpec:
    return NormSpec("rms", config.get("rms_norm_eps", 1e-6), offset=1.0, wide=True)


def _soft_cap(config: Config, key: str, default: float | None) -> float | None:
    """null means no cap; without the key the default applies."""
    if key not in config.values:
        return default
    return config.get(key, 0.0) or None


def _attention(config: Config, head_dim: int, scale_dim: float, rope: RopeSpec) -> AttentionSpec:
    if config.get("use_bidirectional_attention", False):
        raise config.refuse("use_bidirectional_attention is not supported for text generation")
    num_heads, _ = config.heads()
    bias = config.get("attention_bias", False)
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    return AttentionSpec(num_heads, num_kv_heads, head_dim, scale_dim**-0.5, rope, qkv_bias=bias, output_bias=bias)


def _layer(config: Config, attention: AttentionSpec, activation: str | None = None) -> LayerSpec:
    activation = activation or config.activation("hidden_activation", "gelu_pytorch_tanh")
    return LayerSpec(attention, MlpSpec(config.require("intermediate_size", int), activation), _norm(config))


def _model(
    config: Config, architecture: str, layers: tuple[LayerSpec, ...], soft_cap: float | None = None
) -> ModelSpec:
    spec = llama_model(config, architecture, layers, tied=True)
    embedding = replace(spec.embedding, multiplier=spec.hidden_size**0.5, multiplier_is_rounded=True)
    return replace(spec, embedding=embedding, head=replace(spec.head, soft_cap=soft_cap))
