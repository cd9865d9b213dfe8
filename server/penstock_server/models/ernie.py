"""ERNIE 4.5 with experts, which are chosen by corrected softmax scores. The dense models are in `llama.py`."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.models import deepseek, llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location

CORRECTION = Location(f"{moe.MLP}.moe_statics.e_score_correction_bias", ones=(1, 0))
NAMES = replace(deepseek.EXPERT_NAMES | {"layers.{i}.mlp.router.correction": CORRECTION}, ignored=(r"model\.mtp_.*",))


def ernie4_5_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        rope_theta=500000.0, num_key_value_heads=4, rms_norm_eps=1e-5, moe_intermediate_size=1536
    )
    if config.get("use_bias", False):
        raise config.refuse("use_bias is not supported for experts; it must be false")
    routing = RoutingSpec(
        config.get("moe_num_experts", 64),
        config.get("moe_k", 6),
        norm_power=1.0,
        norm_epsilon=config.get("moe_norm_min", 1e-12),
        has_correction=True,
        is_wide=True,
    )
    width = config.require("moe_intermediate_size", int)
    shared = width * config.get("moe_num_shared_experts", 2)
    experts = MoeSpec(routing, width, config.activation(), shared_intermediate_size=shared)
    dense = LayerSpec(llama.llama_attention(config, interleaved=True), llama.llama_mlp(config), llama.rms_norm(config))
    num, last = llama.num_layers(config), config.get("moe_layer_end_index", -1)
    first, interval = config.get("moe_layer_start_index", 1), config.get("moe_layer_interval", 1)
    if interval < 1:
        raise config.refuse(f"moe_layer_interval must be at least 1, not {interval}")
    with_experts = set(range(first, (num - 1 if last == -1 else last) + 1)) & set(range(interval - 1, num, interval))
    layers = tuple(replace(dense, mlp=experts) if index in with_experts else dense for index in range(num))
    return llama.llama_model(config, "ernie4_5_moe", layers, tied=True), NAMES
