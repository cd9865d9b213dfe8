"""InternLM 1, 2 and 3: Llama. InternLM 2 fuses q, k and v per KV head, and has its own tensor names."""

from __future__ import annotations

from penstock_server.layers.attention import AttentionSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"


def internlm(config: Config) -> tuple[ModelSpec, NameMap]:
    bias = config.get("bias", True)
    # `rotary` extends the rope only for texts longer than `max_position_embeddings`, which are not served.
    rotary = config.values.get("rotary") or {}
    base = Config(rotary, config.path).get("base", 10000.0) if isinstance(rotary, dict) else 10000.0
    layer = llama.llama_layer(config.with_defaults(rope_theta=base), qkv_bias=bias, output_bias=bias)
    return llama.llama_model(config, "internlm", (layer,) * llama.num_layers(config)), llama.NAMES


def internlm2(config: Config) -> tuple[ModelSpec, NameMap]:
    bias = config.get("bias", False)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention, llama.llama_mlp(config), llama.rms_norm(config))
    return llama.llama_model(config, "internlm2", (layer,) * llama.num_layers(config)), _names(attention)


def internlm3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rms_norm_eps=1e-5, head_dim=128, num_key_value_heads=2)
    # COMPAT: configurations for the publisher's code have qkv_bias and bias.
    bias = config.get("bias", config.get("mlp_bias", False))
    qkv_bias = config.get("qkv_bias", config.get("attention_bias", False))
    layer = llama.llama_layer(config, qkv_bias=qkv_bias, output_bias=bias, mlp_bias=bias)
    return llama.llama_model(config, "internlm3", (layer,) * llama.num_layers(config)), llama.NAMES


def _names(attention: AttentionSpec) -> NameMap:
    return NameMap(
        names={
            "embedding": "model.tok_embeddings",
            "layers.{i}.attention_norm": f"{LAYER}.attention_norm",
            **fused("layers.{i}.attention", f"{LAYER}.attention.wqkv", attention.widths, attention.num_kv_heads),
            "layers.{i}.attention.output": f"{LAYER}.attention.wo",
            "layers.{i}.mlp_norm": f"{LAYER}.ffn_norm",
            "layers.{i}.mlp.gate": f"{LAYER}.feed_forward.w1",
            "layers.{i}.mlp.up": f"{LAYER}.feed_forward.w3",
            "layers.{i}.mlp.down": f"{LAYER}.feed_forward.w2",
            "norm": "model.norm",
            "head": "output",
        },
        prefix="model.",
    )
