"""Phi 1.5 and 2 (attention and MLP in parallel after one norm, biases), Phi 3 and 4 (Llama, fused projections)."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"
PHI_NAMES = replace(
    llama.NAMES,
    names={
        **llama.NAMES.names,
        "layers.{i}.attention.q_norm": f"{LAYER}.self_attn.q_layernorm",
        "layers.{i}.attention.k_norm": f"{LAYER}.self_attn.k_layernorm",
        "layers.{i}.attention.output": f"{LAYER}.self_attn.dense",
        "layers.{i}.mlp.up": f"{LAYER}.mlp.fc1",
        "layers.{i}.mlp.down": f"{LAYER}.mlp.fc2",
        "norm": "model.final_layernorm",
    },
)


def phi(config: Config) -> tuple[ModelSpec, NameMap]:
    num_heads, head_dim = config.heads()
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, default_partial=0.5),
        qkv_bias=True,
        output_bias=True,
        qk_norm=QkNormSpec(norm) if config.get("qk_layernorm", False) else None,
    )
    activation = config.activation("hidden_act", "gelu_new")
    mlp = MlpSpec(config.require("intermediate_size", int), activation, gated=False, bias=True, down_bias=True)
    spec = ModelSpec(
        architecture="phi",
        hidden_size=config.require("hidden_size", int),
        max_position_tokens=config.require("max_position_embeddings", int),
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=(LayerSpec(attention, mlp, norm, parallel=True, shares_norm=True),) * llama.num_layers(config),
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", False), bias=True),
    )
    return spec, PHI_NAMES


def phi3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rms_norm_eps=1e-5)
    layer = llama.llama_layer(config, mask=AttentionMask(window=config.window()))
    names = replace(
        llama.NAMES,
        names={
            **llama.NAMES.names,
            **fused("layers.{i}.attention", f"{LAYER}.self_attn.qkv_proj", layer.plain_attention.widths),
            **fused("layers.{i}.mlp", f"{LAYER}.mlp.gate_up_proj", layer.plain_mlp.widths),
        },
    )
    return llama.llama_model(config, "phi3", (layer,) * llama.num_layers(config)), names
