"""Persimmon: LayerNorms and biases in every layer, an ungated MLP with squared ReLU, rope in half of each head."""

from __future__ import annotations

from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"


def persimmon(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(hidden_act="relu2", partial_rotary_factor=0.5)
    # Persimmon has no grouped-query attention, and ignores num_key_value_heads.
    config = Config({**config.values, "num_key_value_heads": None}, config.path)
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = QkNormSpec(norm) if config.get("qk_layernorm", True) else None
    attention = llama.llama_attention(config, qkv_bias=True, output_bias=True, qk_norm=qk_norm)
    layer = LayerSpec(attention, llama.llama_mlp(config, gated=False, bias=True), norm)
    qkv = f"{LAYER}.self_attn.query_key_value"
    names = llama.NAMES | {
        **fused("layers.{i}.attention", qkv, attention.widths, attention.num_heads),
        "layers.{i}.attention.q_norm": f"{LAYER}.self_attn.q_layernorm",
        "layers.{i}.attention.k_norm": f"{LAYER}.self_attn.k_layernorm",
        "layers.{i}.attention.output": f"{LAYER}.self_attn.dense",
        "layers.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
        "norm": "model.final_layernorm",
    }
    spec = llama.llama_model(config, "persimmon", (layer,) * llama.num_layers(config))
    return spec, names
