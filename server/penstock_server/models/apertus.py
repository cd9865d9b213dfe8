"""Apertus: Llama with norms per head and an ungated MLP with a learned activation."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

LAYER = "model.layers.{i}"
NAMES = replace(
    llama.NAMES
    | {
        "layers.{i}.attention_norm": f"{LAYER}.attention_layernorm",
        "layers.{i}.mlp_norm": f"{LAYER}.feedforward_layernorm",
        "layers.{i}.mlp.alpha_p": f"{LAYER}.mlp.act_fn.alpha_p",
        "layers.{i}.mlp.alpha_n": f"{LAYER}.mlp.act_fn.alpha_n",
    },
    # Constants of the activation, equal in every checkpoint.
    ignored=(r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)",),
)


def apertus(config: Config) -> tuple[ModelSpec, NameMap]:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if not config.values.get("rope_scaling"):
        config = config.with_defaults(rope_parameters={**llama3, "original_max_position_embeddings": 8192})
    config = config.with_defaults(rope_theta=12e6, rms_norm_eps=1e-5)
    bias, norm = config.get("attention_bias", False), llama.rms_norm(config)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm))
    activation = config.get("hidden_act", "xielu")
    if activation != "xielu":
        activation = config.activation()
    mlp = MlpSpec(config.require("intermediate_size", int), activation, gated=False)
    layer = LayerSpec(attention, mlp, norm)
    return llama.llama_model(config, "apertus", (layer,) * llama.num_layers(config)), NAMES
