"""A tiny model for each supported GGUF architecture and layout, with the metadata that its configuration lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import (
    CASES,
    DEEPSEEK,
    DELTA,
    GPT2_SIZES,
    GRANITE,
    JAMBA,
    LONGROPE,
    MAMBA,
    MAMBA1,
    MAMBA_SIZES,
    PLAIN,
    SIZES,
    T5_SIZES,
    V3_EXPERTS,
    VOCAB,
    Case,
    rope,
)
from published import BAICHUAN_13B


@dataclass(frozen=True)
class GgufCase:
    """A GGUF architecture, the model to write, and extra metadata."""

    architecture: str
    case: str | Case
    metadata: dict[str, Any] = field(default_factory=dict)  # in the architecture's section; an array becomes a tensor
    old_layout: bool = False
    other_order: bool = False  # heads have another order than in safetensors
    facts: Callable[[Any], dict[str, Any]] = lambda model: {}  # further metadata, derived from the model

    @property
    def own_case(self) -> Case:
        """The model to write; a name refers to a case of the parity tests."""
        return CASES[self.case] if isinstance(self.case, str) else self.case


LONGROPE_TENSORS = {
    f"rope_factors_{name}.weight": np.array(LONGROPE["rope_parameters"][f"{name}_factor"], dtype=np.float32)
    for name in ("long", "short")
}
YARN_METADATA = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
# Lengths of keys and values: of the expanded heads, or in newer files of the latent.
LENGTHS = {"attention.key_length": 12, "attention.value_length": 12, "rope.dimension_count": 4}
LATENT_LENGTHS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 20,
    "attention.value_length": 16,
    "attention.key_length_mla": 12,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 4,
}
SIGMOID_METADATA = {**LATENT_LENGTHS, "expert_gating_func": 2, "expert_weights_norm": True}
# GGUF stores one number for mscale and mscale_all_dim, a tenth of their value.
DEEPSEEK_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7)
DEEPSEEK_YARN_METADATA = {**YARN_METADATA, "rope.scaling.yarn_log_multiplier": 0.07}
SHORT_CONV_METADATA = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "shortconv.l_cache": 3,
}
MAMBA_METADATA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 12,
    "ssm.inner_size": 192,
    "rope.scaling.finetuned": False,
}
MAMBA1_METADATA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 144,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 1 << 20,
    "attention.head_count": 0,
}
JAMBA_METADATA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "attention.head_count_kv": [0, 2, 0],
}
# The converter multiplies the weights by these.
FALCON_MULTIPLIERS = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
# GGUF has no limits of the time step.
GRANITE_MAMBA = {**GRANITE, **MAMBA, "time_step_limit": (0.0, float("inf")), "shared_intermediate_size": 40}
MROPE = [11, 11, 10, 0]
FOUR_LAYERS = {**SIZES, "num_hidden_layers": 4}


def activation_constants(model: Any) -> dict[str, Any]:
    """Apertus' learned activation parameters, which GGUF stores as metadata."""
    functions = [layer.mlp.act_fn for layer in model.model.layers]
    return {
        "xielu.alpha_p": [function.alpha_p.item() for function in functions],
        "xielu.alpha_n": [function.alpha_n.item() for function in functions],
        "xielu.beta": [function.beta.item() for function in functions],
    }


DENSE = {
    "llama": GgufCase("llama", "llama"),
    "llama-tied": GgufCase("llama", "llama-nine-heads"),
    "llama-biases": GgufCase("llama", "llama-biases"),
    "llama-head-dim": GgufCase("llama", Case("LlamaConfig", {"head_dim": 16})),
    "llama-yarn": GgufCase("llama", "llama-yarn", YARN_METADATA),
    "mistral": GgufCase("llama", "mistral-no-window"),
    "mistral3": GgufCase("mistral3", "mistral-no-window"),
    "ministral3": GgufCase(
        "mistral3",
        "ministral3",
        {
            "attention.temperature_scale": 0.3,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "apertus": GgufCase("apertus", Case("ApertusConfig", rope("default")), facts=activation_constants),
    "arcee": GgufCase("arcee", "arcee"),
    "baichuan": GgufCase("baichuan", "baichuan"),
    "baichuan-13b": GgufCase(
        "baichuan", Case("LlamaConfig", {}, {**PLAIN, "num_hidden_layers": 40}, published=BAICHUAN_13B)
    ),
    "chatglm": GgufCase("chatglm", "glm"),
    "ernie4_5": GgufCase("ernie4_5", "ernie4-5"),
    "exaone": GgufCase("exaone", "llama"),
    "exaone-other-key": GgufCase(
        "exaone", "llama", {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-6}
    ),
    "exaone4": GgufCase("exaone4", "exaone4", {"attention.sliding_window_pattern": [True, False, True]}),
    "exaone4-no-window": GgufCase("exaone4", "exaone4-no-window"),
    "qwen2": GgufCase("qwen2", "qwen2"),
    "qwen3": GgufCase("qwen3", "qwen3"),
    "qwen3-5": GgufCase("qwen35", "qwen3-5", {"rope.dimension_sections": MROPE}, other_order=True),
    "gemma": GgufCase("gemma", "gemma"),
    # GGUF lacks the scale of the queries; for small models it is the head dimension.
    "gemma2": GgufCase(
        "gemma2", Case("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16})
    ),
    "gemma3": GgufCase(
        "gemma3",
        Case(
            "Gemma3TextConfig",
            {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        ),
    ),
    "gemma3-linear": GgufCase(
        "gemma3",
        Case(
            "Gemma3TextConfig",
            {
                "head_dim": 16,
                "sliding_window": 12,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        ),
        {
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 500.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "glm4": GgufCase("glm4", "glm4"),
    "granite": GgufCase("granite", "granite"),
    "hunyuan": GgufCase("hunyuan-dense", "hunyuan", {"rope.freq_base": 1000.0 * 50.0 ** (16 / 14)}),
    "internlm2": GgufCase("internlm2", "internlm2"),
    "mamba": GgufCase("mamba", Case("MambaConfig", MAMBA1, MAMBA_SIZES), MAMBA1_METADATA),
    "falcon-mamba": GgufCase(
        "mamba", "falcon-mamba", {**MAMBA1_METADATA, "ssm.dt_b_c_rms": True, "ssm.conv_kernel": 3}
    ),
    "mamba2": GgufCase(
        "mamba2",
        Case(
            "Mamba2Config",
            {"num_heads": 12, "head_dim": 16, "state_size": 32, "n_groups": 2, "use_conv_bias": True},
            {"vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 3},
        ),
        {
            **MAMBA_METADATA,
            "ssm.group_count": 2,
            "context_length": 1 << 20,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "nemotron-h": GgufCase(
        "nemotron_h",
        Case(
            "NemotronHConfig",
            {
                "head_dim": 16,
                "n_groups": 2,
                "mamba_num_heads": 12,
                "mamba_head_dim": 16,
                "ssm_state_size": 32,
                "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
                "layer_norm_epsilon": 1e-5,
            },
        ),
        {
            **MAMBA_METADATA,
            "ssm.group_count": 2,
            "attention.head_count_kv": [0, 0, 2, 0, 0],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": [0, 80, 0, 80, 0],
            "expert_count": None,
        },
    ),
    "falcon-h1": GgufCase(
        "falcon-h1",
        Case(
            "FalconH1Config",
            {
                **MAMBA,
                "time_step_limit": (0.0, float("inf")),
                "mamba_n_groups": 2,
                "mamba_d_ssm": 192,
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                **FALCON_MULTIPLIERS,
            },
        ),
        {**MAMBA_METADATA, "ssm.group_count": 2, "rope.scaling.finetuned": None},
    ),
    "granitehybrid-dense": GgufCase(
        "granitehybrid",
        Case(
            "GraniteMoeHybridConfig",
            {
                **GRANITE_MAMBA,
                "num_local_experts": 0,
                "mamba_n_groups": 2,
                "mamba_conv_bias": False,
                "position_embedding_type": "rope",
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            },
        ),
        {
            **MAMBA_METADATA,
            "ssm.group_count": 2,
            "attention.head_count_kv": [2, 0, 0],
            "expert_count": None,
            "rope.scaling.finetuned": True,
        },
    ),
    "lfm2": GgufCase(
        "lfm2", "lfm2", {**SHORT_CONV_METADATA, "attention.head_count_kv": [2, 0, 2], "feed_forward_length": 96}
    ),
    "olmo2": GgufCase("olmo2", "olmo2"),
    "olmo3": GgufCase("olmo2", "olmo3", {**YARN_METADATA, "attention.sliding_window_pattern": [True, False, True]}),
    "phi3": GgufCase("phi3", "phi3"),
    "phi3-longrope": GgufCase(
        "phi3",
        "phi3-long-rope",
        {"rope.scaling.original_context_length": 8, **LONGROPE_TENSORS},
    ),
    "phi4": GgufCase("phi3", "phi4"),
    "seed-oss": GgufCase("seed_oss", "seed-oss"),
    "smollm3": GgufCase("smollm3", Case("SmolLM3Config", {}, FOUR_LAYERS)),
}
LAYER_NORM = {
    "bloom": GgufCase("bloom", "bloom", {"context_length": 256}),
    "cohere2": GgufCase("cohere2", Case("Cohere2Config", {"sliding_window": 12, "logit_scale": 1.5}, FOUR_LAYERS)),
    "command-r": GgufCase("command-r", "cohere"),
    "command-r-plus": GgufCase("command-r", Case("CohereConfig", {"use_qk_norm": True, **rope("default")})),
    "falcon-7b": GgufCase("falcon", "falcon-7b", {"attention.head_count_kv": 1}),
    "falcon-40b": GgufCase(
        "falcon",
        Case("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}, PLAIN),
        {"attention.head_count_kv": 2},
    ),
    "falcon-11b": GgufCase("falcon", "falcon-11b", {"attention.head_count_kv": 2}),
    "gpt2": GgufCase("gpt2", "gpt2"),
    "gptj": GgufCase("gptj", Case("GPTJConfig", {"rotary_dim": 4}, GPT2_SIZES)),
    "gptneox": GgufCase("gptneox", "gpt-neox"),
    "gptneox-sequential": GgufCase("gptneox", "gpt-neox-sequential"),
    "jais2": GgufCase("jais2", "jais2"),
    "mpt": GgufCase("mpt", "mpt", {"attention.clamp_kqv": 1.5, "attention.max_alibi_bias": 8.0}),
    "nemotron": GgufCase("nemotron", "nemotron"),
    "olmo": GgufCase("olmo", "olmo", {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.7}),
    "phi2": GgufCase("phi2", "phi"),
    "stablelm": GgufCase("stablelm", "stablelm"),
    "stablelm-12b": GgufCase("stablelm", "stablelm-12b"),
    "starcoder": GgufCase("starcoder", "gpt-bigcode", {"attention.head_count_kv": 1}),
    "starcoder2": GgufCase("starcoder2", "starcoder2"),
}
EXPERTS = {
    "dots1": GgufCase(
        "dots1",
        Case("Dots1Config", {**V3_EXPERTS, "first_k_dense_replace": 1, "sliding_window": None}),
        {"expert_gating_func": 2, "expert_weights_norm": False},
    ),
    "ernie4_5-moe": GgufCase(
        "ernie4_5-moe",
        "ernie4-5-moe",
        {"expert_shared_count": 2, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    ),
    "exaone-moe": GgufCase(
        "exaone-moe",
        "exaone-moe",
        {
            "expert_shared_count": 2,
            "expert_gating_func": 2,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "hunyuan-moe": GgufCase(
        "hunyuan-moe",
        Case("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 6, "moe_topk": 3}),
        {"expert_shared_count": 1},
    ),
    "minimax-m2": GgufCase("minimax-m2", "minimax-m2", {"expert_gating_func": 2, "expert_feed_forward_length": 80}),
    "glm4moe": GgufCase("glm4moe", "glm4-moe", {"expert_gating_func": 2, "expert_weights_norm": True}),
    "mixtral": GgufCase("llama", "mixtral"),
    "qwen2moe": GgufCase(
        "qwen2moe",
        Case("Qwen2MoeConfig", {**CASES["qwen2-moe"].values, "mlp_only_layers": [], "norm_topk_prob": False}),
    ),
    "qwen3-5-moe": GgufCase(
        "qwen35moe", "qwen3-5-moe", {"feed_forward_length": None, "rope.dimension_sections": MROPE}, other_order=True
    ),
    "nemotron-h-moe": GgufCase(
        "nemotron_h_moe",
        Case(
            "NemotronHConfig",
            {
                "head_dim": 16,
                "n_groups": 2,
                "mamba_num_heads": 12,
                "mamba_head_dim": 16,
                "ssm_state_size": 32,
                "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
                "layer_norm_epsilon": 1e-5,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 40,
                "n_routed_experts": 6,
                "num_experts_per_tok": 3,
                "routed_scaling_factor": 1.5,
            },
        ),
        {
            **MAMBA_METADATA,
            "ssm.group_count": 2,
            "attention.head_count_kv": [0, 0, 2, 0, 0],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": [0, 32, 0, 32, 0],
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 40,
            "expert_weights_norm": True,
        },
    ),
    "qwen3next": GgufCase(
        "qwen3next",
        Case(
            "Qwen3NextConfig",
            {
                **DELTA,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 40,
            },
        ),
    ),
    "qwen3moe": GgufCase(
        "qwen3moe",
        Case("Qwen3MoeConfig", {**CASES["qwen3-moe"].values, "norm_topk_prob": True, "head_dim": 16}),
    ),
    "jamba": GgufCase("jamba", "jamba", JAMBA_METADATA),
    "jamba-dense": GgufCase("jamba", Case("JambaConfig", {**JAMBA, "num_experts": 1}), JAMBA_METADATA),
    "lfm2moe": GgufCase(
        "lfm2moe",
        "lfm2-moe",
        {
            **SHORT_CONV_METADATA,
            "attention.head_count_kv": [0, 0, 2],
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "kimi-linear": GgufCase(
        "kimi-linear",
        Case("KimiLinearConfig", {**CASES["kimi-linear"].values, **ONE_GROUP}),
        {
            **LATENT_LENGTHS,
            "attention.head_count_kv": [0, 1, 0],
            "attention.key_length": 32,
            "attention.key_length_mla": 24,
            "rope.dimension_count": 16,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
            "kda.head_dim": 16,
            "ssm.conv_kernel": 4,
        },
    ),
    "olmoe": GgufCase("olmoe", "olmoe"),
    "granitehybrid": GgufCase(
        "granitehybrid",
        Case(
            "GraniteMoeHybridConfig",
            {**GRANITE_MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        ),
        {**MAMBA_METADATA, "attention.head_count_kv": [0, 2, 0]},
    ),
    "granitemoe": GgufCase("granitemoe", "granitemoe"),
    "granitemoeshared": GgufCase(
        "granitemoe", Case("GraniteMoeSharedConfig", {**GRANITE, "shared_intermediate_size": 40})
    ),
    "phimoe": GgufCase("phimoe", "phimoe"),
    "gpt-oss": GgufCase(
        "gpt-oss",
        "gpt-oss",
        {
            "expert_feed_forward_length": 80,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "dbrx": GgufCase(
        "dbrx",
        "dbrx",
        {
            "attention.head_count_kv": 2,
            "attention.clamp_kqv": 1.5,
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": 40,
            "expert_count": 5,
            "expert_used_count": 2,
        },
    ),
    "deepseek-v2-lite": GgufCase(
        "deepseek2",
        Case("DeepseekV2Config", {**DEEPSEEK, **ONE_GROUP, "q_lora_rank": None, "topk_method": "greedy"}),
        LENGTHS,
        old_layout=True,
    ),
    "deepseek-v2": GgufCase(
        "deepseek2",
        Case(
            "DeepseekV2Config",
            {**DEEPSEEK, "q_lora_rank": 24, "topk_method": "group_limited_greedy", **DEEPSEEK_YARN},
        ),
        {**LATENT_LENGTHS, **DEEPSEEK_YARN_METADATA, "expert_gating_func": 1},
    ),
    "deepseek-v3": GgufCase(
        "deepseek2",
        Case("DeepseekV3Config", {**DEEPSEEK, "q_lora_rank": 24, **DEEPSEEK_YARN}),
        {**SIGMOID_METADATA, **DEEPSEEK_YARN_METADATA},
    ),
}
# Metadata of all T5 files.
T5_METADATA = {"context_length": 512, "feed_forward_length": 80, "attention.layer_norm_rms_epsilon": 1e-6}
T5_METADATA |= {"decoder_start_token_id": 0, "attention.key_length": 16}
ENCODERS = {
    "t5": GgufCase("t5", Case("T5Config", {}, T5_SIZES), {**T5_METADATA, "attention.relative_buckets_count": 32}),
    "t5-v1.1": GgufCase(
        "t5", "t5-v1.1", {**T5_METADATA, "attention.relative_buckets_count": 12, "decoder_block_count": 2}
    ),
}
DECODERS = DENSE | LAYER_NORM | EXPERTS
GGUF_CASES = DECODERS | ENCODERS
