"""MiniMax M2: Llama with norms over all queries and all keys, rope in a part of each head, and experts that are chosen
by corrected sigmoids."""

from __future__ import annotations

from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

NAMES = moe.MIXTRAL_NAMES | {"layers.{i}.mlp.router.correction": f"{moe.BLOCK}.e_score_correction_bias"}


def minimax_m2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, head_dim=128, rope_theta=5e6, intermediate_size=1536)
    norm, rotary_dim = llama.rms_norm(config), config.optional_int("rotary_dim")
    attention = llama.llama_attention(
        config,
        qk_norm=QkNormSpec(norm, over="projection"),
        default_partial=1.0 if rotary_dim is None else rotary_dim / config.heads()[1],
    )
    routing = RoutingSpec(
        moe.num_experts(config, 256),
        config.get("num_experts_per_tok", 8),
        scoring="sigmoid",
        norm_power=1.0,
        has_correction=True,
        is_wide=True,
    )
    experts = MoeSpec(routing, config.require("intermediate_size", int), config.activation())
    layers = (LayerSpec(attention, experts, norm),) * llama.num_layers(config)
    return llama.llama_model(config, "minimax_m2", layers), NAMES
