"""dots.llm1: Qwen 3 with the experts of DeepSeek V3. Solar Open: Llama with them in all layers."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import deepseek, llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap


def dots1(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        num_key_value_heads=32, sliding_window=4096, n_group=1, topk_group=1, norm_topk_prob=False
    )
    bias, norm = config.get("attention_bias", False), llama.rms_norm(config)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm))
    sparse = deepseek.experts(config, deepseek.v3_routing(config), config.get("n_shared_experts", 0))
    num, window = llama.num_layers(config), config.window()
    num_full = num if config.values["sliding_window"] is None else min(num, config.get("max_window_layers", 62))
    types = config.layer_types(["full_attention"] * num_full + ["sliding_attention"] * (num - num_full))
    layer = LayerSpec(attention, sparse, norm)
    layers = tuple(
        llama.with_window(replace(layer, mlp=mlp), window if kind == "sliding_attention" else None)
        for kind, mlp in zip(types, deepseek.mlps(config, sparse), strict=True)
    )
    return llama.llama_model(config, "dots1", layers), deepseek.EXPERT_NAMES


def solar_open(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        moe_intermediate_size=1280,
        n_routed_experts=128,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
    )
    attention = llama.llama_attention(config, qkv_bias=config.get("attention_bias", False))
    experts = deepseek.experts(config, deepseek.v3_routing(config), config.get("n_shared_experts", 1))
    layers = (LayerSpec(attention, experts, llama.rms_norm(config)),) * llama.num_layers(config)
    return llama.llama_model(config, "solar_open", layers), deepseek.EXPERT_NAMES
