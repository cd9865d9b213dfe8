"""The tiny models of the parity tests: a configuration for every architecture, several if its layouts differ by size.

To test an architecture, add a line here and a builder with a name map under `penstock_server/models`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from published import (
    BAICHUAN,
    BAICHUAN2,
    BAICHUAN_13B,
    CHATGLM,
    DEEPSEEK_MOE,
    EXAONE,
    FALCON_RW,
    INTERNLM,
    INTERNLM2,
    INTERNLM2_BIAS,
    KIMI_K2,
    MIXFORMER,
    MLLAMA_TEXT,
    OLMO_HYBRID,
    PHI_FIRST,
    REFINED_WEB,
    REFINED_WEB_MODEL,
    Published,
)

VOCAB = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PLAIN = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
GPT2_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 3,
    "num_heads": 6,
}
BART_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "max_position_embeddings": 128,
    **{f"{side}_layers": 3 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 6 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 80 for side in ("encoder", "decoder")},
}
# Texts bypass the layers that attend to images.
MLLAMA_SIZES: dict[str, Any] = {"num_hidden_layers": 5, "cross_attention_layers": [1, 4], "bos_token_id": 1}
NEVER = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def rope(kind: str, theta: float = 1000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


@dataclass(frozen=True)
class Case:
    """A configuration class of transformers, and its arguments."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    shortest: int = 1  # tokens of the shortest prompt
    published: Published | None = None  # saved in a layout that transformers does not have
    has_own_head: bool = False  # although transformers says that it is tied

    def num_source(self, text: list[int]) -> int:
        """The number of a text's tokens that are the source, derived from its first token; 0 without an encoder."""
        return 5 + text[0] % 8 if self.has_encoder else 0

    @property
    def config_class(self) -> Any:
        """None: the installed transformers is older than the architecture."""
        return getattr(transformers, self.config, None)

    @property
    def has_encoder(self) -> bool:
        return self.config_class is not None and bool(self.config_class().is_encoder_decoder)

    @property
    def keeps_state(self) -> bool:
        """Whether some layers keep a state between tokens instead of keys and values."""
        keys = (
            "linear_num_key_heads",
            "linear_num_heads",
            "layer_group_size",
            "mamba_d_state",
            "mamba_n_heads",
            "state_size",
            "ssm_state_size",
            "linear_attn_alpha_factor",
        )
        return any(key in self.values for key in keys) or self.config.startswith("Lfm2")

    @property
    def model_type(self) -> str:
        if self.published is not None:
            return self.published.model_type
        return self.config if self.config_class is None else self.config_class.model_type


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
# Head dimension 8: four frequencies.
LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.2, 2.0, 4.0, 8.0])


def phimoe_rope(original_max_tokens: int) -> dict[str, Any]:
    """The same factors for texts of any length, since transformers selects only the magnitude by it."""
    factors, magnitudes = [1.0, 1.1, 1.3, 1.6], {"short_mscale": 1.3, "long_mscale": 0.8}
    lengths = {"original_max_position_embeddings": original_max_tokens}
    scaled = rope("longrope", short_factor=factors, long_factor=factors, **magnitudes, **lengths)
    return {"num_local_experts": 2, **scaled}


GRANITE: dict[str, Any] = {
    "num_local_experts": 4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}
# Llamas with experts as DeepSeek V3 has them, and heads of 16 elements.
V3_EXPERTS: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key in ("moe_intermediate_size", "n_routed_experts")},
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "head_dim": 16,
    "routed_scaling_factor": 1.5,
}
KDA_EXPERTS: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
    "qk_rope_head_dim": 16,  # so that native kernels need not pad the latents
    "rms_norm_eps": 0.1,  # as for DELTA
    "num_local_experts": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
# Three heads for each key head; heads of attention get 16 elements, of which 4 are rotated. Some outputs of random
# states are almost zero, and with a small epsilon their norm makes rounding to bfloat16 as large as the logits.
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "rms_norm_eps": 0.1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
DELTA_EXPERTS: dict[str, Any] = {
    **DELTA,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
OLMO_DELTA: dict[str, Any] = {
    "rms_norm_eps": 0.1,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
}
# Twelve heads in one group, which are computed as eight and four.
MAMBA: dict[str, Any] = {
    "hidden_size": 96,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "time_step_limit": (0.02, 0.6),
}
# Two groups of three heads, so that three ranks share a group.
MAMBA2: dict[str, Any] = {"n_groups": 2, "conv_kernel": 3, "use_bias": True, "time_step_limit": (0.0, 0.5)}
# Twice 72 channels are no multiple of the parts of 128 that a thread computes.
MAMBA_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 72, "num_hidden_layers": 3}
MAMBA1: dict[str, Any] = {"state_size": 8, "time_step_rank": 6}
# A small epsilon makes rounding to bfloat16 large here, as in DELTA.
JAMBA: dict[str, Any] = {
    "hidden_size": 48,
    "rms_norm_eps": 0.1,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 6,
}
DEEPSEEK_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.2)

CASES: dict[str, Case] = {
    "llama": Case("LlamaConfig"),
    "llama-nine-heads": Case(
        "LlamaConfig",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama-biases": Case("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-gelu": Case("LlamaConfig", {"hidden_act": "gelu", "head_dim": 16}),
    "llama3-rope": Case("LlamaConfig", LLAMA3),
    "llama-yarn": Case("LlamaConfig", YARN),
    "mllama-text": Case("MllamaTextConfig", MLLAMA_SIZES, published=MLLAMA_TEXT),
    "mistral": Case("MistralConfig", {"sliding_window": 16}),
    "mistral-no-window": Case("MistralConfig", {"sliding_window": None}),
    "qwen2": Case("Qwen2Config"),
    "qwen2-window": Case("Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": Case("Qwen3Config", {"head_dim": 16}),
    "gemma": Case("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": Case("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24}),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": Case("GPT2Config", {}, GPT2_SIZES),
    "gpt2-scaled": Case(
        "GPT2Config",
        {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "activation_function": "relu"},
        GPT2_SIZES,
    ),
    "gpt-neox": Case("GPTNeoXConfig", {}, PLAIN),
    "gpt-neox-sequential": Case(
        "GPTNeoXConfig",
        {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
        PLAIN,
    ),
    "gptj": Case("GPTJConfig", {"rotary_dim": 4}, GPT2_SIZES),
    "falcon-7b": Case("FalconConfig", {}, PLAIN),
    "falcon-40b": Case("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}, PLAIN),
    "falcon-11b": Case(
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80},
        PLAIN,
    ),
    "falcon-rw": Case(
        "FalconConfig",
        # 12 heads have slopes that bfloat16 rounds.
        {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True, "num_attention_heads": 12},
        PLAIN,
    ),
    "bloom": Case("BloomConfig", {}, {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "bloom-normed-residual": Case(
        "BloomConfig",
        {"apply_residual_connection_post_layernorm": True},
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    ),
    "opt": Case("OPTConfig", {}, {**PLAIN, "ffn_dim": 80}),
    "opt-350m": Case("OPTConfig", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, {**PLAIN, "ffn_dim": 80}),
    "phi": Case("PhiConfig", {"hidden_size": 96}),
    "phi-qk-norm": Case("PhiConfig", {"hidden_size": 96, "qk_layernorm": True}),
    "phi3": Case("Phi3Config", {"sliding_window": 14}),
    "phi3-short-rope": Case("Phi3Config", {"original_max_position_embeddings": 256, **LONGROPE}),
    "phi3-long-rope": Case("Phi3Config", {"original_max_position_embeddings": 8, **LONGROPE}, shortest=9),
    "phi4": Case("Phi3Config", {"hidden_size": 96, **rope("default", partial_rotary_factor=0.5)}),
    "cohere": Case("CohereConfig", {"logit_scale": 0.25}),
    "cohere-qk-norm": Case("CohereConfig", {"use_qk_norm": True, "attention_bias": True}),
    "olmo2": Case("Olmo2Config"),
    # The second layer is dense, the third one without rope.
    "llama4": Case(
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 112,
            "moe_layers": [0, 2],
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 12,
            "floor_scale": 10,
            "attn_scale": 0.5,
            **LLAMA3,
        },
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 4}),
    "mixtral-two-experts": Case("MixtralConfig", {"num_local_experts": 2, "sliding_window": 16}),
    "qwen2-moe": Case(
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe": Case(
        "Qwen3MoeConfig",
        # With one KV head, the keys of consecutive tokens are not contiguous in the fused projection.
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_key_value_heads": 1},
    ),
    "qwen3-next": Case(
        "Qwen3NextConfig",
        {**DELTA_EXPERTS, "mlp_only_layers": [1]},
    ),
    "olmoe": Case("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": Case("GraniteMoeConfig", GRANITE),
    "granitemoeshared": Case(
        "GraniteMoeSharedConfig", {**GRANITE, "shared_intermediate_size": 40, "hidden_act": "gelu"}
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            **MAMBA,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "granitemoehybrid-dense": Case(
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            **MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "bamba": Case("BambaConfig", {**MAMBA, "mamba_n_groups": 3, "attn_layer_indices": [1]}),
    "mamba2": Case(
        "Mamba2Config",
        {**MAMBA2, "num_heads": 6, "head_dim": 16, "state_size": 32},
        {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3},
    ),
    "mamba": Case("MambaConfig", {**MAMBA1, "use_bias": True}, MAMBA_SIZES),
    "falcon-mamba": Case(
        "FalconMambaConfig",
        {
            **MAMBA1,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
            "expand": 16,
            "intermediate_size": 144,
        },
        MAMBA_SIZES,
    ),
    "jamba": Case("JambaConfig", {**JAMBA, "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}),
    "jamba-dense": Case("JambaConfig", {**JAMBA, "num_experts": 1, "mamba_proj_bias": True}),
    "falcon-h1": Case(
        "FalconH1Config",
        {
            **MAMBA,
            "mamba_n_groups": 2,
            "mamba_d_ssm": 192,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 1.4,
            "mlp_multipliers": [0.8, 1.6],
            "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "falcon-h1-norm": Case(
        "FalconH1Config",
        {
            **MAMBA,
            "mamba_d_ssm": 192,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "ssm_out_multiplier": 1.4,
            "num_hidden_layers": 2,
        },
    ),
    "nemotron-h": Case(
        "NemotronHConfig",
        {
            **MAMBA2,
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "phimoe": Case("PhimoeConfig", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-short-rope": Case("PhimoeConfig", phimoe_rope(256)),
    "phimoe-long-rope": Case("PhimoeConfig", phimoe_rope(8), shortest=9),
    "gpt-oss": Case(
        "GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 12}
    ),
    "dbrx": Case(
        "DbrxConfig",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 1000.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2},
            **rope("default"),
        },
        {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256},
    ),
    "deepseek-v2-lite": Case("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v2": Case(
        "DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": 24, "topk_method": "group_limited_greedy", **DEEPSEEK_YARN}
    ),
    "deepseek-v3": Case("DeepseekV3Config", {**DEEPSEEK, "q_lora_rank": 24, **DEEPSEEK_YARN}),
    "stablelm": Case("StableLmConfig", {"hidden_size": 96, "use_qkv_bias": True}),
    "stablelm-12b": Case("StableLmConfig", {"hidden_size": 96, "qk_layernorm": True, "use_parallel_residual": True}),
    "mpt": Case(
        "MptConfig",
        {"attn_config": {"clip_qkv": 1.5}},
        {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256},
    ),
    "gpt-bigcode": Case("GPTBigCodeConfig", {}, GPT2_SIZES),
    "starcoder2": Case("Starcoder2Config", {"sliding_window": 14}),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "olmo": Case("OlmoConfig", {"clip_qkv": 0.7}),
    "olmo3": Case(
        "Olmo3Config",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    # Three layers: the norm of its states has a fixed small epsilon (see DELTA), and rounding adds up.
    "olmo-hybrid": Case("OlmoHybridConfig", {**OLMO_DELTA, "linear_value_head_dim": 32}, published=OLMO_HYBRID),
    # Without rope. Keys are as wide as values, so transformers can save the convolution as it is published.
    "olmo-hybrid-no-rope": Case(
        "OlmoHybridConfig",
        {**OLMO_DELTA, "linear_value_head_dim": 16, "linear_allow_neg_eigval": False, "rope_theta": None},
    ),
    "cohere2": Case("Cohere2Config", {"sliding_window": 12, "sliding_window_pattern": 2, "logit_scale": 1.5}),
    "smollm3": Case("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "smollm3-window": Case(
        "SmolLM3Config", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 12}
    ),
    "qwen3-window": Case(
        "Qwen3Config",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3-5-moe": Case("Qwen3_5MoeTextConfig", {**DELTA_EXPERTS, "tie_word_embeddings": True}),
    "qwen3-5": Case("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": True}),
    # One convolution: it multiplies three numbers, and rounding adds up.
    "lfm2": Case(
        "Lfm2Config",
        {"norm_eps": 1e-5, "full_attn_idxs": [0, 2], "block_multiple_of": 48, "block_ffn_dim_multiplier": 1.6},
    ),
    "lfm2-biases": Case(
        "Lfm2Config",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention", "conv", "conv"],
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": Case(
        "Lfm2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "layer_types": ["conv", "conv", "full_attention"],
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2-moe-no-bias": Case(
        "Lfm2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 0,
            "layer_types": ["conv", "full_attention", "conv"],
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
    ),
    "gpt-neo": Case(
        "GPTNeoConfig",
        {
            "window_size": 12,
            "attention_types": [[["local", "global"], 1], [["local"], 1]],
        },
        {"vocab_size": VOCAB, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "max_position_embeddings": 256},
    ),
    "codegen": Case("CodeGenConfig", {"n_embd": 64, "n_head": 8, "rotary_dim": 4}, GPT2_SIZES),
    "internlm": Case("LlamaConfig", {"attention_bias": True}, PLAIN, published=INTERNLM),
    "exaone": Case("LlamaConfig", {"tie_word_embeddings": True, **LLAMA3}, published=EXAONE),
    "chatglm": Case(
        "GlmConfig",
        {"head_dim": 16, **rope("default", 500000.0, partial_rotary_factor=0.5)},
        published=CHATGLM,
    ),
    "refined-web": Case(
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        PLAIN,
        published=REFINED_WEB,
    ),
    "refined-web-model": Case("FalconConfig", {"parallel_attn": True}, PLAIN, published=REFINED_WEB_MODEL),
    "refined-web-model-alibi": Case(
        "FalconConfig",
        {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True, "num_attention_heads": 12},
        PLAIN,
        published=FALCON_RW,
    ),
    "phi-msft": Case("PhiConfig", {"hidden_size": 96, "num_key_value_heads": 6}, published=PHI_FIRST),
    "phi-mixformer": Case("PhiConfig", {"hidden_size": 96, "num_key_value_heads": 6}, published=MIXFORMER),
    "deepseek": Case(
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "qkv_bias": False,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
        published=DEEPSEEK_MOE,
    ),
    "kimi-k2": Case(
        "DeepseekV3Config",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, **DEEPSEEK_YARN},
        published=KIMI_K2,
    ),
    "kimi-linear": Case(
        "KimiLinearConfig",
        {
            **KDA_EXPERTS,
            "linear_num_heads": 6,
            "linear_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "bailing-hybrid": Case(
        "BailingHybridConfig",
        {**KDA_EXPERTS, "head_dim": 16, "short_conv_kernel_size": 3, "layer_group_size": 2, "num_mtp_layers": 0},
    ),
    "bailing-hybrid-no-limit": Case(
        "BailingHybridConfig", {**KDA_EXPERTS, "head_dim": 16, "layer_group_size": 2, "kda_safe_gate": False}
    ),
    "minimax": Case(
        "MiniMaxConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.8,
            "full_attn_alpha_factor": 1.3,
            "mlp_alpha_factor": 2.0,
            "mlp_beta_factor": 0.7,
        },
    ),
    "internlm2": Case("LlamaConfig", published=INTERNLM2),
    "internlm2-biases": Case("LlamaConfig", {"attention_bias": True}, published=INTERNLM2_BIAS),
    "internlm3": Case("InternLM3Config", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "baichuan": Case("LlamaConfig", {}, PLAIN, published=BAICHUAN),
    "baichuan2": Case("LlamaConfig", {}, PLAIN, published=BAICHUAN2),
    "baichuan-13b": Case("LlamaConfig", {}, PLAIN, published=BAICHUAN_13B),
    "glm": Case("GlmConfig", {"head_dim": 16}),
    "glm4": Case("Glm4Config", {"head_dim": 16}),
    "glm4-moe": Case("Glm4MoeConfig", {**V3_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-lite": Case(
        "Glm4MoeLiteConfig",
        {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
        | {"q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"], **DEEPSEEK_YARN},
    ),
    "dots1": Case(
        "Dots1Config",
        {
            **V3_EXPERTS,
            "first_k_dense_replace": 1,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "solar-open": Case("SolarOpenConfig", {**V3_EXPERTS, "attention_bias": True}),
    "exaone-moe": Case(
        "ExaoneMoeConfig",
        {
            **{key: value for key, value in V3_EXPERTS.items() if not key.startswith("n_")},
            "num_experts": 8,
            "n_group": 4,
            "num_shared_experts": 2,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
        },
    ),
    "hy-v3": Case(
        "HYV3Config",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
        },
    ),
    "minimax-m2": Case(
        "MiniMaxM2Config", {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3}
    ),
    "ernie4-5-moe": Case(
        "Ernie4_5_MoeConfig",
        {
            "head_dim": 16,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan-moe": Case(
        "HunYuanMoEV1Config",
        {
            "head_dim": 16,
            "num_experts": 6,
            "moe_topk": [3, 3, 3],
            "attention_bias": True,
            **rope("dynamic", alpha=50.0, factor=1.0),
        },
    ),
    "cohere2-moe": Case(
        "Cohere2MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 112,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "logit_scale": 0.5,
        },
    ),
    "cohere2-moe-softmax": Case(
        "Cohere2MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.5,
        },
    ),
    "nanochat": Case("NanoChatConfig", {"head_dim": 16, "num_key_value_heads": 2, "attention_bias": True}),
    "mimo-v2-flash": Case(
        "MiMoV2FlashConfig",
        {
            **{key: value for key, value in V3_EXPERTS.items() if key != "n_shared_experts"},
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 5000.0), ("sliding_attention", 100.0))
            },
        },
    ),
    "helium": Case("HeliumConfig", {"head_dim": 8}),
    "nemotron": Case("NemotronConfig", {"hidden_size": 96}),
    "ministral": Case(
        "MinistralConfig",
        {
            "head_dim": 8,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # Four steps of the queries' scale within 64 tokens.
    "ministral3": Case(
        "Ministral3Config",
        {
            "head_dim": 16,
            "hidden_size": 96,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            ),
        },
    ),
    "cwm": Case("CwmConfig", {"head_dim": 16, "sliding_window": 12, "bos_token_id": 1, **LLAMA3}),
    "seed-oss": Case("SeedOssConfig", {"head_dim": 16}),
    "exaone4": Case("Exaone4Config", {"sliding_window": 12, "sliding_window_pattern": 2}),
    "exaone4-no-window": Case(
        "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
    ),
    "arcee": Case("ArceeConfig"),
    "apertus": Case("ApertusConfig", LLAMA3),
    "jais2": Case("Jais2Config", {"head_dim": 16}),
    "persimmon": Case("PersimmonConfig", {"hidden_size": 96}, PLAIN),
    "hunyuan": Case("HunYuanDenseV1Config", {"head_dim": 16, **rope("dynamic", alpha=50.0, factor=1.0)}),
    "ernie4-5": Case("Ernie4_5Config", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "gpt-bigcode-mha": Case("GPTBigCodeConfig", {"multi_query": False}, GPT2_SIZES),
    # Encoders: sources of 5 to 12 tokens. Distances exceed the largest bucket.
    "t5": Case("T5Config", {"relative_attention_max_distance": 24}, T5_SIZES, shortest=13),
    "t5-v1.1": Case(
        "T5Config",
        {
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "num_decoder_layers": 2,
            "relative_attention_num_buckets": 12,
        },
        T5_SIZES,
        shortest=13,
        has_own_head=True,
    ),
    "mt5": Case("MT5Config", {"relative_attention_max_distance": 20}, T5_SIZES, shortest=13, has_own_head=True),
    "mt5-tied": Case("MT5Config", {"feed_forward_proj": "gated-silu", "num_heads": 5}, T5_SIZES, shortest=13),
    "bart": Case("BartConfig", {}, BART_SIZES, shortest=13),
    "bart-uneven": Case(
        "BartConfig",
        {"scale_embedding": True, "encoder_layers": 1, "decoder_ffn_dim": 48, "activation_function": "relu"},
        BART_SIZES,
        shortest=13,
    ),
    "mbart": Case("MBartConfig", {"scale_embedding": True}, BART_SIZES, shortest=13),
    "umt5": Case("UMT5Config", {"relative_attention_max_distance": 20}, T5_SIZES, shortest=13, has_own_head=True),
    "pegasus": Case("PegasusConfig", {"scale_embedding": True, "activation_function": "relu"}, BART_SIZES, shortest=13),
    # Its code gives padding tokens no position, so the padding token is one that no text of the tests contains.
    "m2m-100": Case(
        "M2M100Config",
        {"pad_token_id": VOCAB, "decoder_layers": 2},
        {**BART_SIZES, "vocab_size": VOCAB + 1, "max_position_embeddings": 160},
        shortest=13,
    ),
}
