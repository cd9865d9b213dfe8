"""DeepSeek 1 with experts: Llama with shared experts. DeepSeek V2 and V3: latent attention. In all of them, the first
layers are dense, the others have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.latent_attention import LatentAttentionSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.rope import RopeSpec, yarn_magnitude
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.context import rope_parameters
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location

ATTENTION = "model.layers.{i}.self_attn"
EXPERT_NAMES = moe.with_experts(
    {
        **moe.QWEN_EXPERTS,
        "router.correction": f"{moe.MLP}.gate.e_score_correction_bias",
        "shared.gate": f"{moe.MLP}.shared_experts.gate_proj",
        "shared.up": f"{moe.MLP}.shared_experts.up_proj",
        "shared.down": f"{moe.MLP}.shared_experts.down_proj",
    }
)
ATTENTION_NAMES: dict[str, str | Location] = {
    "layers.{i}.attention.q_a": f"{ATTENTION}.q_a_proj",
    "layers.{i}.attention.q_norm": f"{ATTENTION}.q_a_layernorm",
    "layers.{i}.attention.q_b": f"{ATTENTION}.q_b_proj",
    "layers.{i}.attention.kv_a": f"{ATTENTION}.kv_a_proj_with_mqa",
    "layers.{i}.attention.kv_norm": f"{ATTENTION}.kv_a_layernorm",
    "layers.{i}.attention.kv_b": f"{ATTENTION}.kv_b_proj",
}
MTP_NAMES: dict[str, str | Location] = {
    "layers.{i}.mtp.token_norm": "model.layers.{i}.enorm",
    "layers.{i}.mtp.hidden_norm": "model.layers.{i}.hnorm",
    "layers.{i}.mtp.project": "model.layers.{i}.eh_proj",
    "layers.{i}.mtp.norm": "model.layers.{i}.shared_head.norm",
}
NAMES = EXPERT_NAMES | ATTENTION_NAMES | MTP_NAMES


# Values of keys that a configuration leaves out.
ATTENTION_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V2_DEFAULTS: dict[str, Any] = {
    **ATTENTION_DEFAULTS,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
V3_DEFAULTS: dict[str, Any] = {
    **ATTENTION_DEFAULTS,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
}


def deepseek(config: Config) -> tuple[ModelSpec, NameMap]:
    scoring = config.get("scoring_func", "softmax")
    if scoring != "softmax":
        raise config.refuse(f"scoring_func {scoring!r} is not supported; supported: softmax")
    bias = config.get("attention_bias", False)
    dense = llama.llama_layer(config, qkv_bias=bias, output_bias=bias)
    layers = [dense] * llama.num_layers(config)
    if config.optional_int("n_routed_experts") is not None:
        routing = RoutingSpec(
            config.require("n_routed_experts", int),
            config.require("num_experts_per_tok", int),
            norm_power=1.0 if config.get("norm_topk_prob", False) else None,
            norm_epsilon=1e-20,
        )
        width = config.require("moe_intermediate_size", int)
        shared = width * config.get("n_shared_experts", 0)
        sparse = replace(dense, mlp=MoeSpec(routing, width, config.activation(), shared_intermediate_size=shared))
        first, step = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
        layers = [dense if index < first or index % step else sparse for index in range(len(layers))]
    return llama.llama_model(config, "deepseek", tuple(layers)), EXPERT_NAMES


def kimi_k2(config: Config) -> tuple[ModelSpec, NameMap]:
    spec, names = deepseek_v3(config)
    return replace(spec, architecture="kimi_k2"), names


def deepseek_v2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(**V2_DEFAULTS)
    routing = _routing(config)
    method = config.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        routing = _with_groups(config, routing)
    elif method != "greedy":
        raise config.refuse(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    return latent_model(config, "deepseek_v2", routing)


def deepseek_v3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(**V3_DEFAULTS)
    return latent_model(config, "deepseek_v3", v3_routing(config))


def v3_routing(config: Config) -> RoutingSpec:
    return replace(
        _with_groups(config, _routing(config)),
        scoring="sigmoid",
        norm_power=1.0 if config.get("norm_topk_prob", True) else None,
        norm_epsilon=1e-20,
        has_correction=True,
        group_score="best-two",
    )


def _routing(config: Config) -> RoutingSpec:
    return RoutingSpec(
        config.require("n_routed_experts", int),
        config.require("num_experts_per_tok", int),
        scale=config.get("routed_scaling_factor", 1.0),
        is_wide=True,
    )


def _with_groups(config: Config, routing: RoutingSpec) -> RoutingSpec:
    return replace(routing, num_groups=config.require("n_group", int), top_groups=config.require("topk_group", int))


def experts(config: Config, routing: RoutingSpec, num_shared: int) -> MoeSpec:
    """num_shared: experts that process every token."""
    if config.get("mlp_bias", False):
        raise config.refuse("mlp_bias is not supported for experts; it must be false")
    width = config.require("moe_intermediate_size", int)
    return MoeSpec(routing, width, config.activation(), shared_intermediate_size=width * num_shared)


def mlps(config: Config, sparse: MoeSpec) -> list[MlpSpec | MoeSpec]:
    """Each layer's: as `mlp_layer_types` says, or experts behind `first_k_dense_replace` plain MLPs."""
    num = llama.num_layers(config)
    num_dense = min(num, config.get("first_k_dense_replace", 0))
    types = config.layer_types(
        ["dense"] * num_dense + ["sparse"] * (num - num_dense), ("dense", "sparse"), key="mlp_layer_types"
    )
    return [sparse if kind == "sparse" else llama.llama_mlp(config) for kind in types]


def with_mtp(config: Config, spec: ModelSpec, names: NameMap, layer: LayerSpec) -> tuple[ModelSpec, NameMap]:
    """With the multi-token prediction layers, the first of which may draft, numbered behind the others. layer: such a
    layer. What is not loaded: the others, copies of embedding and head."""
    num_mtp = config.get("num_nextn_predict_layers", 0)
    ignored = tuple(rf"model\.layers\.{spec.num_layers + index}\..*" for index in range(num_mtp))
    return replace(spec, mtp=layer if num_mtp else None), replace(names, ignored=(*names.ignored, *ignored))


def latent_model(config: Config, architecture: str, routing: RoutingSpec) -> tuple[ModelSpec, NameMap]:
    sparse = experts(config, routing, config.get("n_shared_experts", 0))
    rope = read_rope(config, config.require("qk_rope_head_dim", int), interleaved=config.get("rope_interleave", True))
    layer = LayerSpec(latent_attention(config, rope), sparse, llama.rms_norm(config))
    layers = tuple(replace(layer, mlp=mlp) for mlp in mlps(config, sparse))
    return with_mtp(config, llama.llama_model(config, architecture, layers), NAMES, layer)


def latent_attention(config: Config, rope: RopeSpec | None) -> LatentAttentionSpec:
    mscale = rope_parameters(config).get("mscale_all_dim", 0.0)
    return LatentAttentionSpec(
        num_heads=config.require("num_attention_heads", int),
        kv_lora_rank=config.require("kv_lora_rank", int),
        qk_nope_head_dim=config.require("qk_nope_head_dim", int),
        qk_rope_head_dim=config.require("qk_rope_head_dim", int),
        v_head_dim=config.require("v_head_dim", int),
        rope=rope,
        q_lora_rank=config.optional_int("q_lora_rank"),
        has_bias=config.get("attention_bias", False),
        mscale=yarn_magnitude(rope.factor, mscale) if rope is not None and rope.kind != "default" else 1.0,
    )
