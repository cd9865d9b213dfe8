"""Hunyuan's first models: Llama with norms of queries and keys after rope, dense or with experts. HY 3: the same with
norms before rope, and experts that are chosen by corrected sigmoids."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import deepseek, llama, moe
from penstock_server.models.config import Config
from penstock_server.models.context import rope_kind, rope_parameters
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location

NORM_NAMES = {
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.query_layernorm",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.key_layernorm",
}
SHARED_NAMES: dict[str, str | Location] = {
    f"shared.{name}": f"{moe.MLP}.shared_mlp.{name}_proj" for name in ("gate", "up", "down")
}
NAMES = llama.NAMES | NORM_NAMES
MOE_NAMES = moe.with_experts({**moe.QWEN_EXPERTS, **SHARED_NAMES, "router": f"{moe.MLP}.gate.wg"}) | NORM_NAMES
HY3_NAMES = replace(
    moe.with_experts(
        {
            **moe.QWEN_EXPERTS,
            **SHARED_NAMES,
            "router": f"{moe.MLP}.router.gate",
            "router.correction": f"{moe.MLP}.expert_bias",
        }
    ),
    alternatives=(deepseek.EXPERT_NAMES,),  # adapters name the modules of transformers
)


def hunyuan(config: Config) -> tuple[ModelSpec, NameMap]:
    config = _with_stretched_theta(config.with_defaults(rms_norm_eps=1e-5))
    layer = LayerSpec(_attention(config), llama.llama_mlp(config), llama.rms_norm(config))
    return llama.llama_model(config, "hunyuan_v1_dense", (layer,) * llama.num_layers(config)), NAMES


def hunyuan_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = _with_stretched_theta(config.with_defaults(rms_norm_eps=1e-5))
    routing = RoutingSpec(
        _same_in_all(config, "num_experts"), _same_in_all(config, "moe_topk"), norm_power=1.0, is_wide=True
    )
    width = config.require("intermediate_size", int)
    experts = MoeSpec(routing, width, config.activation(), shared_intermediate_size=width)
    layer = LayerSpec(_attention(config), experts, llama.rms_norm(config))
    return llama.llama_model(config, "hunyuan_v1_moe", (layer,) * llama.num_layers(config)), MOE_NAMES


def hy_v3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=11158840.0,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
    )
    routing = RoutingSpec(
        moe.num_experts(config, 192),
        config.get("num_experts_per_tok", 8),
        scoring="sigmoid",
        norm_power=1.0,
        norm_epsilon=1e-20,
        scale=config.get("router_scaling_factor", 2.826),
        has_correction=True,
        is_wide=True,
    )
    bias, norm = config.get("attention_bias", False), llama.rms_norm(config)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm))
    sparse = deepseek.experts(config, routing, config.get("num_shared_experts", 1))
    layer = LayerSpec(attention, sparse, norm)
    layers = tuple(replace(layer, mlp=mlp) for mlp in deepseek.mlps(config, sparse))
    # A layer for multi-token prediction follows the others.
    names = replace(HY3_NAMES, ignored=(rf"model\.layers\.{len(layers)}\..*",))
    return llama.llama_model(config, "hy_v3", layers), names


def _attention(config: Config) -> AttentionSpec:
    bias, norm = config.get("attention_bias", False), QkNormSpec(llama.rms_norm(config), is_after_rope=True)
    return llama.llama_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=norm)


def _same_in_all(config: Config, key: str) -> int:
    """A number, or a list with the same number for each layer."""
    value = config.values.get(key)
    if isinstance(value, list) and len(set(value)) > 1:
        raise config.refuse(f"{key} that differs between layers is not supported, and it is {value}")
    return config.part({key: value[0] if isinstance(value, list) and value else value}).get(key, 1)


def _with_stretched_theta(config: Config) -> Config:
    """Rope scaling `dynamic` with an `alpha` is a larger theta, at any length."""
    rope = rope_parameters(config)
    if not rope.get("alpha", 0.0) or rope_kind(rope.values) != "dynamic":
        return config
    _, head_dim = config.heads()
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    theta *= rope.require("alpha", float) ** (head_dim / (head_dim - 2))
    stretched = {"rope_type": "default", "rope_theta": theta}
    return config.part({**config.values, "rope_parameters": stretched, "rope_scaling": None})
