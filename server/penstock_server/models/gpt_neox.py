"""GPT-NeoX and Pythia: attention and MLP in parallel, each with its own norm; q, k and v fused per head."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "gpt_neox.layers.{i}"


def gpt_neox(config: Config) -> tuple[ModelSpec, NameMap]:
    num_heads, head_dim = config.heads()
    bias = config.get("attention_bias", True)
    # COMPAT: before transformers 5, theta and the rotary part had other names here.
    theta, partial = config.get("rotary_emb_base", 10000.0), config.get("rotary_pct", 0.25)
    rope = read_rope(config, head_dim, default_theta=theta, default_partial=partial)
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, rope, qkv_bias=bias, output_bias=bias)
    activation = config.activation("hidden_act", "gelu")
    mlp = MlpSpec(config.require("intermediate_size", int), activation, gated=False, bias=True, down_bias=True)
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    layer = LayerSpec(attention, mlp, norm, parallel=config.get("use_parallel_residual", True))
    return llama.llama_model(config, "gpt_neox", (layer,) * llama.num_layers(config)), _names(attention)


def _names(attention: AttentionSpec) -> NameMap:
    qkv = f"{LAYER}.attention.query_key_value"
    names = NameMap(
        names={
            "embedding": "gpt_neox.embed_in",
            "layers.{i}.attention_norm": f"{LAYER}.input_layernorm",
            **fused("layers.{i}.attention", qkv, attention.widths, attention.num_heads),
            "layers.{i}.attention.output": f"{LAYER}.attention.dense",
            "layers.{i}.mlp_norm": f"{LAYER}.post_attention_layernorm",
            "layers.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
            "layers.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        # Masks and tables that old exporters saved.
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.bias",),
        prefix="gpt_neox.",
    )
    # Transformers 5 calls the module lm_head, but not the tensor.
    return replace(names, alternatives=(names | {"head": "lm_head"},))
