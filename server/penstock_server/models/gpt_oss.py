"""gpt-oss: attention sinks, a sliding window on every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.experts.spec import CLAMPED_SWIGLU
from penstock_server.layers.norm import NormSpec
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap
from penstock_server.weights.quantization.method import quantization_method

EXPERT_NAMES = moe.with_experts(
    {
        "router": f"{moe.MLP}.router",
        "experts.gate_up.weight": f"{moe.MLP}.experts.gate_up_proj",
        "experts.gate_up.bias": f"{moe.MLP}.experts.gate_up_proj_bias",
        "experts.down.weight": f"{moe.MLP}.experts.down_proj",
        "experts.down.bias": f"{moe.MLP}.experts.down_proj_bias",
    }
)
MXFP4_NAMES = {
    "layers.{i}.mlp.experts.gate_up.weight": f"{moe.MLP}.experts.gate_up_proj.{{e}}",
    "layers.{i}.mlp.experts.down.weight": f"{moe.MLP}.experts.down_proj.{{e}}",
}
NAMES = EXPERT_NAMES | {"layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks"}
# The rope of a configuration that leaves it out.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, head_dim=64, sliding_window=128, rope_theta=150000.0)
    if not config.values.get("rope_scaling"):
        config = config.with_defaults(rope_parameters=ROPE)
    num = llama.num_layers(config)
    routing = RoutingSpec(
        moe.num_experts(config, 128), config.get("num_experts_per_tok", 4), scoring="softmax-chosen", has_bias=True
    )
    is_mxfp4 = quantization_method(config.values.get("quantization_config")) == "mxfp4"
    experts = MoeSpec(
        routing,
        config.require("intermediate_size", int),
        CLAMPED_SWIGLU,
        has_bias=True,
        swiglu_alpha=config.get("swiglu_alpha", 1.702),
        swiglu_limit=config.get("swiglu_limit", 7.0),
        storage="by-output" if is_mxfp4 else "by-input",
        module_interleaves=True,
    )
    bias = config.get("attention_bias", True)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias)
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True)
    layer = replace(layer, attention=replace(layer.plain_attention, sinks=True), mlp=experts, norm=norm)
    types = config.layer_types(["full_attention" if index % 2 else "sliding_attention" for index in range(num)])
    windowed = llama.with_window(layer, config.window())
    layers = tuple(windowed if kind == "sliding_attention" else layer for kind in types)
    return llama.llama_model(config, "gpt_oss", layers), NAMES | MXFP4_NAMES if is_mxfp4 else NAMES
