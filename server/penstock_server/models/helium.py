"""Helium: Llama with interleaved rope, and norms that round only their result."""

from __future__ import annotations

from penstock_server.layers.norm import NormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap


def helium(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rope_theta=100000.0, head_dim=128)
    attention = llama.llama_attention(config, qkv_bias=config.get("attention_bias", False), interleaved=True)
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-8), wide=True)
    layer = LayerSpec(attention, llama.llama_mlp(config, bias=config.get("mlp_bias", False)), norm)
    return llama.llama_model(config, "helium", (layer,) * llama.num_layers(config)), llama.NAMES
