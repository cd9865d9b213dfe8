"""Cohere's Command R: attention and MLP side by side behind one LayerNorm without bias, interleaved rope."""

from __future__ import annotations

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models.config import Config
from penstock_server.models.llama import NAMES, num_layers
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap


def cohere(config: Config) -> tuple[ModelSpec, NameMap]:
    num_heads, head_dim = config.heads()
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5))
    bias = config.get("attention_bias", False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, default_theta=500000.0, interleaved=True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNormSpec(norm, over="heads") if config.get("use_qk_norm", False) else None,
    )
    mlp = MlpSpec(config.require("intermediate_size", int), config.activation())
    spec = ModelSpec(
        architecture="cohere",
        hidden_size=config.require("hidden_size", int),
        max_position_tokens=config.require("max_position_embeddings", int),
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=(LayerSpec(attention, mlp, norm, parallel=True, shares_norm=True),) * num_layers(config),
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", True), multiplier=config.get("logit_scale", 0.0625)),
    )
    return spec, NAMES
