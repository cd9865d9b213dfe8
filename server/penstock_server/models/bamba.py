"""Bamba: Llama with Mamba 2 in place of attention in most layers, and rope in half of each head."""

from __future__ import annotations

from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.mamba2 import net_names, read_net
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

LAYER = "model.layers.{i}"


def bamba(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
    bias, attending = config.get("attention_bias", False), config.integers("attn_layer_indices") or []
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias, default_partial=0.5)
    mlp, net = llama.llama_mlp(config, bias=config.get("mlp_bias", False)), read_net(config)
    layers = tuple(
        LayerSpec(attention if index in attending else net, mlp, llama.rms_norm(config))
        for index in range(llama.num_layers(config))
    )
    return llama.llama_model(config, "bamba", layers), llama.NAMES | {
        **net_names(net, f"{LAYER}.mamba"),
        "layers.{i}.mlp_norm": f"{LAYER}.pre_ff_layernorm",
        **{f"layers.{{i}}.mlp.{name}": f"{LAYER}.feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        "norm": "model.final_layernorm",
    }
