"""Hunyuan's dense models: Llama with norms of queries and keys after rope."""

from __future__ import annotations

from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.context import rope_kind, rope_parameters
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

NAMES = llama.NAMES | {
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.query_layernorm",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.key_layernorm",
}


def hunyuan(config: Config) -> tuple[ModelSpec, NameMap]:
    config = _with_stretched_theta(config.with_defaults(rms_norm_eps=1e-5))
    bias = config.get("attention_bias", False)
    norm = llama.rms_norm(config)
    attention = llama.llama_attention(
        config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm, is_after_rope=True)
    )
    layer = LayerSpec(attention, llama.llama_mlp(config), norm)
    return llama.llama_model(config, "hunyuan_v1_dense", (layer,) * llama.num_layers(config)), NAMES


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
