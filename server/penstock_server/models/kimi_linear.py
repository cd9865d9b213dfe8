"""Kimi Linear: gated delta networks whose states decay element by element, and in every fourth layer latent attention
without rope. The experts are those of DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_server.layers.gated_delta import GatedDeltaSpec
from penstock_server.layers.latent_attention import LatentAttentionSpec
from penstock_server.models import deepseek, llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location

KINDS = ("linear_attention", "full_attention")
MLP = ("gate", "up", "down")
NET = "layers.{i}.attention.net"
LAYER = "model.layers.{i}"
# The keys of DeepSeek V3, and those of its descendants.
SPELLINGS = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_nextn_predict_layers": "num_mtp_layers",
}
DEFAULTS: dict[str, Any] = {
    **deepseek.V3_DEFAULTS,
    "max_position_embeddings": 1 << 20,
    "q_lora_rank": None,
    "n_routed_experts": 256,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}


def kimi_linear(config: Config) -> tuple[ModelSpec, NameMap]:
    config = with_defaults(config, DEFAULTS)
    linear = config.part(config.values.get("linear_attn_config") or {})
    num = llama.num_layers(config)
    default = [KINDS[index > 0 and index % 4 == 0] for index in range(num)]
    attending = linear.integers("full_attn_layers")
    if attending is not None:
        default = [KINDS[index + 1 in attending] for index in range(num)]
    head_dim = linear.get("head_dim", config.get("linear_head_dim", 128))
    net = GatedDeltaSpec(
        num_heads=linear.get("num_heads", config.get("linear_num_heads", 32)),
        num_key_heads=linear.get("num_heads", config.get("linear_num_heads", 32)),
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        norm_eps=llama.rms_norm(config).eps,
        decays_elements=True,
        has_sigmoid_gates=True,
        rank=head_dim,
    )
    layers = layers_of(config, net, deepseek.latent_attention(config, None), config.layer_types(default, KINDS))
    return llama.llama_model(config, "kimi_linear", layers), NAMES


def with_defaults(config: Config, defaults: dict[str, Any]) -> Config:
    """In the keys of DeepSeek V3."""
    return config.renamed(**SPELLINGS).renamed(n_routed_experts="num_local_experts").with_defaults(**defaults)


def layers_of(
    config: Config, net: GatedDeltaSpec, attention: LatentAttentionSpec, kinds: list[str]
) -> tuple[LayerSpec, ...]:
    if config.activation() != "silu":
        raise config.refuse(f"hidden_act must be silu, not {config.activation()!r}")
    sparse = deepseek.experts(config, deepseek.v3_routing(config), config.get("n_shared_experts", 0))
    parts: dict[str, GatedDeltaSpec | LatentAttentionSpec] = {"linear_attention": net, "full_attention": attention}
    return tuple(
        LayerSpec(parts[kind], mlp, llama.rms_norm(config))
        for kind, mlp in zip(kinds, deepseek.mlps(config, sparse), strict=True)
    )


def net_names(module: str) -> dict[str, str | Location]:
    """What the nets of all descendants have in common."""
    own = {"a_log": "A_log", "dt_bias": "dt_bias", "norm": "o_norm"}
    own |= {name: f"{name}_proj" for name in "qkvb"} | {f"conv.{name}": f"{name}_conv1d" for name in "qkv"}
    return {f"{NET}.{ours}": f"{module}.{theirs}" for ours, theirs in own.items()}


ATTENTION = f"{LAYER}.self_attn"
PUBLISHED = replace(
    moe.MIXTRAL_NAMES
    | deepseek.ATTENTION_NAMES
    | net_names(ATTENTION)
    | {
        f"{NET}.a_log": Location(f"{ATTENTION}.A_log", ones=(2, 1)),
        f"{NET}.a.down": f"{ATTENTION}.f_a_proj",
        f"{NET}.a": f"{ATTENTION}.f_b_proj",
        f"{NET}.z.down": f"{ATTENTION}.g_a_proj",
        f"{NET}.z": f"{ATTENTION}.g_b_proj",
        f"{NET}.output": f"{ATTENTION}.o_proj",
        "layers.{i}.mlp.router.correction": f"{moe.BLOCK}.gate.e_score_correction_bias",
        **{f"layers.{{i}}.mlp.shared.{name}": f"{moe.BLOCK}.shared_experts.{name}_proj" for name in MLP},
    },
    # COMPAT: transformers saves dense layers under the name of the others.
    others={f"layers.{{i}}.mlp.{name}": f"{moe.BLOCK}.{name}_proj" for name in MLP},
)
# The modules of transformers, as adapters name them.
MODULES = PUBLISHED | {
    f"{NET}.a.down": f"{ATTENTION}.forget_gate.f_a_proj",
    f"{NET}.a": f"{ATTENTION}.forget_gate.f_b_proj",
    **{f"layers.{{i}}.mlp.shared.{name}": f"{moe.MLP}.shared_experts.{name}_proj" for name in MLP},
}
NAMES = replace(PUBLISHED, alternatives=(MODULES,))
