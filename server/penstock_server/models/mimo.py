"""MiMo V2: Llama with values that are shorter than keys, and the experts of DeepSeek V3, of which none is shared.
Layers with a sliding window have twice the KV heads, a rope of their own, and sinks."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.models import deepseek, llama
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import LayerSpec, ModelSpec, Multipliers, NameMap

NAMES = replace(
    deepseek.EXPERT_NAMES | {"layers.{i}.attention.sinks": "model.layers.{i}.self_attn.attention_sink_bias"},
    ignored=(r"model\.mtp\..*",),
)
PERIOD = 6  # the first layer and the last of every six have full attention
ROPES = {"full_attention": ("rope_theta", 5e6), "sliding_attention": ("swa_rope_theta", 1e4)}


def mimo_v2_flash(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        num_key_value_heads=4,
        head_dim=192,
        v_head_dim=128,
        rms_norm_eps=1e-5,
        sliding_window=129,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        attention_value_scale=0.707,
    )
    num_heads, head_dim = config.heads()
    before = config.optional_int("sliding_window_size")  # tokens in front of the one that attends to them
    if before is not None:
        config = config.part({**config.values, "sliding_window": before + 1})
    kinds = {}
    for kind, (key, theta) in ROPES.items():
        is_windowed = kind == "sliding_attention"
        kinds[kind] = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=config.require("num_key_value_heads", int) * (2 if is_windowed else 1),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=read_rope(
                config, head_dim, default_theta=theta, theta_key=key, layer_type=kind, default_partial=0.334
            ),
            qkv_bias=config.get("attention_bias", False),
            mask=AttentionMask(config.window() if is_windowed else None),
            sinks=is_windowed,
            value_dim=config.require("v_head_dim", int),
        )
    # The scale of values is one of what is attended to.
    multipliers = Multipliers(attention=config.get("attention_value_scale", 1.0))
    num = llama.num_layers(config)
    default = ["sliding_attention" if index > 0 and (index + 1) % PERIOD else "full_attention" for index in range(num)]
    sparse = deepseek.experts(config, deepseek.v3_routing(config), 0)
    norm = llama.rms_norm(config)
    layers = tuple(
        LayerSpec(kinds[kind], mlp, norm, multipliers=multipliers)
        for kind, mlp in zip(config.layer_types(default, tuple(kinds)), deepseek.mlps(config, sparse), strict=True)
    )
    return llama.llama_model(config, "mimo_v2_flash", layers), NAMES
