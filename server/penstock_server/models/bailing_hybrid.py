"""Ling 3: Kimi Linear with limited decays, and latent attention with rope and a gate for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_server.layers.gated_delta import GatedDeltaSpec
from penstock_server.models import deepseek, llama
from penstock_server.models.config import Config
from penstock_server.models.kimi_linear import KINDS, NET, layers_of, net_names, with_defaults
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import ModelSpec, NameMap

ATTENTION = "model.layers.{i}.attention"
MODULE = "model.layers.{i}.self_attn"
DEFAULTS: dict[str, Any] = {
    **deepseek.V3_DEFAULTS,
    "max_position_embeddings": 1 << 18,
    "n_routed_experts": 512,
    "moe_intermediate_size": 768,
    "first_k_dense_replace": 2,
    "rope_theta": 6e6,
}


def bailing_hybrid(config: Config) -> tuple[ModelSpec, NameMap]:
    config = with_defaults(config, DEFAULTS)
    config = config.part({**config.values, "q_lora_rank": None})  # transformers has no key for it
    num, group = llama.num_layers(config), config.get("layer_group_size", 6)
    if group < 1:
        raise config.refuse(f"layer_group_size must be at least 1, not {group}")
    num_heads = config.require("num_attention_heads", int)
    # COMPAT: transformers overwrites head_dim as it saves a configuration.
    head_dim = config.get("linear_head_dim", config.get("head_dim", 128))
    net = GatedDeltaSpec(
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=config.get("linear_conv_kernel_dim", config.get("short_conv_kernel_size", 4)),
        norm_eps=llama.rms_norm(config).eps,
        decays_elements=True,
        decay_floor=config.get("kda_lower_bound", -5.0) if config.get("kda_safe_gate", True) else None,
        has_sigmoid_gates=True,
    )
    rope = read_rope(config, config.require("qk_rope_head_dim", int), interleaved=True)
    attention = replace(deepseek.latent_attention(config, rope), has_gates=True)
    kinds = config.layer_types([KINDS[(index + 1) % group == 0] for index in range(num)], KINDS)
    # The multi-token prediction layers, which do not draft.
    num_mtp = config.get("num_nextn_predict_layers", 0)
    ignored = tuple(rf"model\.layers\.{index}\..*" for index in range(num, num + num_mtp))
    spec = llama.llama_model(config, "bailing_hybrid", layers_of(config, net, attention, kinds))
    return spec, replace(NAMES, ignored=(*NAMES.ignored, *ignored))


PUBLISHED = (
    deepseek.EXPERT_NAMES
    | {ours: str(theirs).replace("self_attn", "attention") for ours, theirs in deepseek.ATTENTION_NAMES.items()}
    | net_names(ATTENTION)
    | {
        "embedding": "model.word_embeddings",
        "layers.{i}.attention.q": f"{ATTENTION}.q_proj",
        "layers.{i}.attention.gates": f"{ATTENTION}.g_proj",
        "layers.{i}.attention.output": f"{ATTENTION}.dense",
        f"{NET}.a": f"{ATTENTION}.f_proj",
        f"{NET}.z": f"{ATTENTION}.g_proj",
        f"{NET}.output": f"{ATTENTION}.dense",
        "layers.{i}.mlp.router.correction": "model.layers.{i}.mlp.gate.expert_bias",
    }
)
# The modules of transformers, as adapters name them.
MODULES = deepseek.NAMES | {
    **net_names(MODULE),
    "layers.{i}.attention.gates": f"{MODULE}.g_proj",
    f"{NET}.a": f"{MODULE}.forget_gate.f_proj",
    f"{NET}.z": f"{MODULE}.g_proj",
    f"{NET}.output": f"{MODULE}.o_proj",
}
NAMES = replace(PUBLISHED, alternatives=(MODULES,))
