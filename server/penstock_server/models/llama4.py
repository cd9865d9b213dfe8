"""Llama 4: layers with rope attend within chunks, those without it scale their queries by position, and a token's
experts get the input times its weight."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.layers.temperature import TemperatureSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

BLOCK = "model.layers.{i}.feed_forward"
NAMES = llama.NAMES | {
    **{f"layers.{{i}}.mlp.{name}": f"{BLOCK}.{name}_proj" for name in ("gate", "up", "down")},
    **{f"layers.{{i}}.mlp.shared.{name}": f"{BLOCK}.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "layers.{i}.mlp.router": f"{BLOCK}.router",
    "layers.{i}.mlp.experts.gate_up.weight": f"{BLOCK}.experts.gate_up_proj",
    "layers.{i}.mlp.experts.down.weight": f"{BLOCK}.experts.down_proj",
    "layers.{i}.mlp.modules.experts": f"{BLOCK}.experts",
}


def llama4(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0, attention_chunk_size=8192
    )
    num = llama.num_layers(config)
    interval, step = config.get("no_rope_layer_interval", 4), config.get("interleave_moe_layer_step", 1)
    if min(interval, step) < 1:
        raise config.refuse("no_rope_layer_interval and interleave_moe_layer_step must be at least 1")
    has_rope = config.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(num)]
    if len(has_rope) < num:
        raise config.refuse(f"no_rope_layers must have {num} numbers, not {len(has_rope)}")
    given = config.integers("moe_layers")
    with_experts = set(range(step - 1, num, step) if given is None else given)
    types = config.layer_types(["chunked_attention" if each else "full_attention" for each in has_rope[:num]])
    dense, sparse = _mlps(config)
    layers = tuple(
        _layer(config, has_rope=bool(has_rope[index]), kind=kind, mlp=sparse if index in with_experts else dense)
        for index, kind in enumerate(types)
    )
    return llama.llama_model(config, "llama4_text", layers), NAMES


def _layer(config: Config, *, has_rope: bool, kind: str, mlp: MlpSpec | MoeSpec) -> LayerSpec:
    bias = config.get("attention_bias", False)
    norm = llama.rms_norm(config)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias, interleaved=True)
    if kind == "chunked_attention":
        attention = replace(attention, mask=AttentionMask(chunk=config.window("attention_chunk_size")))
    elif kind != "full_attention":
        raise config.refuse(f"layers of type {kind} are not supported for this architecture")
    if not has_rope:
        is_tuned = config.values.get("attn_temperature_tuning", True)  # published as true, or as a number
        temperature = TemperatureSpec(config.get("floor_scale", 8192), config.get("attn_scale", 0.1))
        attention = replace(attention, rope=None, temperature=temperature if is_tuned else None)
    elif config.get("use_qk_norm", True):
        qk_norm = QkNormSpec(NormSpec("rms", norm.eps, attention.head_dim), is_after_rope=True)
        attention = replace(attention, qk_norm=qk_norm)
    return LayerSpec(attention, mlp, norm)


def _mlps(config: Config) -> tuple[MlpSpec, MoeSpec]:
    width, activation = config.get("intermediate_size", 8192), config.activation()
    routing = RoutingSpec(
        config.get("num_local_experts", 16),
        config.get("num_experts_per_tok", 1),
        scoring="sigmoid",
        scales_inputs=True,
    )
    experts = MoeSpec(
        routing, width, activation, storage="transposed", module_swaps=True, shared_intermediate_size=width
    )
    return MlpSpec(config.get("intermediate_size_mlp", 16384), activation), experts
