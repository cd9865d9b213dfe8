"""Tiny random mixtures of experts made by transformers, with our specs and parameter names for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.weights.location import Location, fused
from torch import Tensor, nn

HIDDEN = 48
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 0,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
}
MIXTRAL = "model.layers.0.block_sparse_moe"
QWEN = "model.layers.0.mlp"

BY_EXPERT_W = {
    "router.weight": f"{MIXTRAL}.gate.weight",
    "experts.gate.weight": f"{MIXTRAL}.experts.{{e}}.w1.weight",
    "experts.up.weight": f"{MIXTRAL}.experts.{{e}}.w3.weight",
    "experts.down.weight": f"{MIXTRAL}.experts.{{e}}.w2.weight",
}
BY_EXPERT = {
    "router.weight": f"{QWEN}.gate.weight",
    "experts.gate.weight": f"{QWEN}.experts.{{e}}.gate_proj.weight",
    "experts.up.weight": f"{QWEN}.experts.{{e}}.up_proj.weight",
    "experts.down.weight": f"{QWEN}.experts.{{e}}.down_proj.weight",
}
STACKED = {
    "router.weight": f"{QWEN}.gate.weight",
    "experts.gate_up.weight": f"{QWEN}.experts.gate_up_proj",
    "experts.down.weight": f"{QWEN}.experts.down_proj",
}
GRANITE = {
    "router.weight": f"{MIXTRAL}.router.layer.weight",
    "experts.gate_up.weight": f"{MIXTRAL}.input_linear.weight",
    "experts.down.weight": f"{MIXTRAL}.output_linear.weight",
}
GRANITE_SHARED = {
    **{
        f"{name}.weight": source
        for name, source in fused(
            "shared", "model.layers.0.shared_mlp.input_linear.weight", {"gate": 32, "up": 32}
        ).items()
    },
    "shared.down.weight": "model.layers.0.shared_mlp.output_linear.weight",
}
DBRX = "transformer.blocks.0.ffn"


def shared(name: str) -> dict[str, str]:
    return {f"shared.{part}.weight": f"{QWEN}.{name}.{part}_proj.weight" for part in ("gate", "up", "down")}


@dataclass(frozen=True)
class Case:
    """One kind of mixture."""

    config: str
    differences: dict[str, Any]
    spec: MoeSpec
    names: Mapping[str, str | Location]  # our name without prefix → the checkpoint's
    save: dict[str, Any] = field(default_factory=dict)


def dbrx(num_experts: int, norm_power: float) -> Case:
    experts = {"moe_num_experts": num_experts, "moe_top_k": 2, "moe_normalize_expert_weights": norm_power}
    return Case(
        "DbrxConfig",
        {
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 1,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 40, **experts},
        },
        MoeSpec(RoutingSpec(num_experts, 2, norm_power=norm_power), 40, storage="rows"),
        {
            "router.weight": f"{DBRX}.router.layer.weight",
            "experts.gate.weight": f"{DBRX}.experts.mlp.w1",
            "experts.up.weight": f"{DBRX}.experts.mlp.v1",
            "experts.down.weight": f"{DBRX}.experts.mlp.w2",
        },
    )


CASES = {
    "mixtral": Case(
        "MixtralConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 2},
        MoeSpec(RoutingSpec(6, 2, norm_power=1.0), 40),
        BY_EXPERT_W,
    ),
    "mixtral-two-experts": Case(
        "MixtralConfig",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        MoeSpec(RoutingSpec(2, 1, norm_power=1.0), 40),
        BY_EXPERT_W,
    ),
    "mixtral-stacked": Case(
        "MixtralConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 2},
        MoeSpec(RoutingSpec(6, 2, norm_power=1.0), 40, storage="stacked"),
        STACKED,
        {"save_original_format": False},
    ),
    "qwen2-moe": Case(
        "Qwen2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
        },
        MoeSpec(RoutingSpec(8, 4), 24, shared_intermediate_size=56, shared_is_gated=True),
        {**BY_EXPERT, **shared("shared_expert"), "shared_gate.weight": f"{QWEN}.shared_expert_gate.weight"},
    ),
    "qwen3-moe": Case(
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
        MoeSpec(RoutingSpec(8, 3, norm_power=1.0), 24),
        BY_EXPERT,
    ),
    "qwen3-moe-gelu": Case(
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "hidden_act": "gelu"},
        MoeSpec(RoutingSpec(8, 3), 24, activation="gelu"),
        BY_EXPERT,
    ),
    "olmoe": Case(
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 4},
        MoeSpec(RoutingSpec(8, 4), 40),
        BY_EXPERT,
    ),
    "granitemoe": Case(
        "GraniteMoeConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3},
        MoeSpec(RoutingSpec(8, 3, scoring="softmax-chosen"), 40, storage="stacked"),
        GRANITE,
    ),
    "granitemoe-two-experts": Case(
        "GraniteMoeConfig",
        {"num_local_experts": 2, "num_experts_per_tok": 2},
        MoeSpec(RoutingSpec(2, 2, scoring="softmax-chosen"), 40, storage="stacked"),
        GRANITE,
    ),
    "granitemoeshared": Case(
        "GraniteMoeSharedConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        MoeSpec(
            RoutingSpec(4, 2, scoring="softmax-chosen"),
            40,
            storage="stacked",
            shared_intermediate_size=32,
        ),
        {**GRANITE, **GRANITE_SHARED},
    ),
    "deepseek-v2": Case(
        "DeepseekV2Config",
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.5,
        },
        MoeSpec(
            RoutingSpec(8, 3, scale=2.5, is_wide=True, num_groups=4, top_groups=2), 24, shared_intermediate_size=48
        ),
        {**BY_EXPERT, **shared("shared_experts")},
    ),
    "deepseek-v2-greedy": Case(
        "DeepseekV2Config",
        {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "topk_method": "greedy"},
        MoeSpec(RoutingSpec(8, 3, is_wide=True), 24, shared_intermediate_size=24),
        {**BY_EXPERT, **shared("shared_experts")},
    ),
    "deepseek-v3": Case(
        "DeepseekV3Config",
        {
            **LATENT,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        MoeSpec(
            RoutingSpec(
                12,
                4,
                scoring="sigmoid",
                norm_power=1.0,
                norm_epsilon=1e-20,
                scale=2.5,
                has_correction=True,
                is_wide=True,
                num_groups=4,
                top_groups=2,
                group_score="best-two",
            ),
            24,
            shared_intermediate_size=24,
        ),
        {
            **BY_EXPERT,
            **shared("shared_experts"),
            "router.correction": f"{QWEN}.gate.e_score_correction_bias",
        },
    ),
    "dbrx": dbrx(num_experts=4, norm_power=1.0),
    "dbrx-two-experts": dbrx(num_experts=2, norm_power=2.0),
    **{
        f"gpt-oss-{num_experts}": Case(
            "GptOssConfig",
            {"num_local_experts": num_experts, "num_experts_per_tok": 2, "head_dim": 8},
            MoeSpec(
                RoutingSpec(num_experts, 2, scoring="softmax-chosen", has_bias=True),
                40,
                activation="clamped-swiglu",
                has_bias=True,
                storage="by-input",
            ),
            {
                "router.weight": f"{QWEN}.router.weight",
                "router.bias": f"{QWEN}.router.bias",
                "experts.gate_up.weight": f"{QWEN}.experts.gate_up_proj",
                "experts.gate_up.bias": f"{QWEN}.experts.gate_up_proj_bias",
                "experts.down.weight": f"{QWEN}.experts.down_proj",
                "experts.down.bias": f"{QWEN}.experts.down_proj_bias",
            },
        )
        for num_experts in (8, 2)
    },
    "phimoe": Case(
        "PhimoeConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
        MoeSpec(RoutingSpec(6, 2, scoring="sparsemixer", jitter=0.1), 40),
        BY_EXPERT_W,
    ),
}


def make_model(case: Case, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """One layer with weights in `dtype`, large enough that every part affects the result."""
    differences = {"experts_implementation": "eager"} if case.config != "DbrxConfig" else {}
    base = {} if case.config == "DbrxConfig" else BASE
    config = getattr(transformers, case.config)(**{**base, "vocab_size": 64, **case.differences})
    torch.manual_seed(len(case.config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **differences)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("correction_bias"):
                tensor.uniform_(0.0, 0.3)
            elif name.endswith("bias"):
                tensor.normal_(std=0.5)
            elif "layernorm" in name:
                tensor.uniform_(0.5, 1.5)
            elif not name.endswith("inv_freq"):
                tensor.normal_(std=0.2)
    corrections = {name: tensor.clone() for name, tensor in model.named_buffers() if name.endswith("correction_bias")}
    model = model.to(dtype)
    for name, tensor in corrections.items():  # transformers keeps it in float32, too
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Buffer(tensor))
    return model.eval()


def save(case: Case, model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder, **case.save)
    return folder / "model.safetensors"


def expected(case: Case, model: transformers.PreTrainedModel, x: Tensor) -> Tensor:
    """The output of transformers for x [rows, hidden]."""
    with torch.inference_mode():
        if case.config == "DbrxConfig":
            return model.transformer.blocks[0].ffn(x[None])[0]
        layer = model.model.layers[0]
        if case.config == "GraniteMoeSharedConfig":
            return (layer.block_sparse_moe(x[None]) + layer.shared_mlp(x[None]))[0]
        block = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        output = block(x[None])
        return (output[0] if isinstance(output, tuple) else output)[0]
