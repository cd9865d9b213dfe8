"""Phi 1.5 and 2 (attention and MLP in parallel after one norm, biases), Phi 3 and 4 (Llama, fused projections)."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.attention.interface import AttentionMask
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"
PHI_NAMES = llama.NAMES | {
    "layers.{i}.attention.q_norm": f"{LAYER}.self_attn.q_layernorm",
    "layers.{i}.attention.k_norm": f"{LAYER}.self_attn.k_layernorm",
    "layers.{i}.attention.output": f"{LAYER}.self_attn.dense",
    "layers.{i}.mlp.up": f"{LAYER}.mlp.fc1",
    "layers.{i}.mlp.down": f"{LAYER}.mlp.fc2",
    "norm": "model.final_layernorm",
}


def phi(config: Config) -> tuple[ModelSpec, NameMap]:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = QkNormSpec(norm) if config.get("qk_layernorm", False) else None
    attention = llama.llama_attention(config, qkv_bias=True, output_bias=True, qk_norm=qk_norm, default_partial=0.5)
    activation = config.activation("hidden_act", "gelu_new")
    mlp = MlpSpec(config.require("intermediate_size", int), activation, gated=False, bias=True, down_bias=True)
    layer = LayerSpec(attention, mlp, norm, parallel=True, shares_norm=True)
    spec = llama.llama_model(config, "phi", (layer,) * llama.num_layers(config))
    return replace(spec, head=replace(spec.head, bias=True)), PHI_NAMES


def phi3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rms_norm_eps=1e-5)
    layer = llama.llama_layer(config, mask=AttentionMask(window=config.window()))
    names = llama.NAMES | {
        **fused("layers.{i}.attention", f"{LAYER}.self_attn.qkv_proj", layer.plain_attention.widths),
        **fused("layers.{i}.mlp", f"{LAYER}.mlp.gate_up_proj", layer.plain_mlp.widths),
    }
    return llama.llama_model(config, "phi3", (layer,) * llama.num_layers(config)), names
