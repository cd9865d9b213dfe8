"""GGUF metadata → the `config.json` and `generation_config.json` of a Hugging Face folder. Imports no torch.

One builder for each GGUF architecture; an architecture without one is refused by name. What metadata do not say is said
by which tensors are there, and where they do not either, by the constants of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock_server.weights.gguf_metadata import Metadata
from penstock_server.weights.gguf_rope import rope_parameters

# Files do not say by what Gemma's queries are scaled. The largest model of each generation, known by its layers, scales
# by hidden_size / num_heads, the others by head_dim.
GEMMA_LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}
GEMMA3_PERIOD = 6  # every so many layers one sees everything
GEMMA3_LOCAL_THETA = 10000.0


def model_config(metadata: Metadata) -> dict[str, Any]:
    """`config.json`. Raises ConfigError for an architecture or a feature that is not supported."""
    builder = BUILDERS.get(metadata.architecture)
    if builder is None:
        supported = ", ".join(sorted(BUILDERS))
        raise metadata.refuse(f"GGUF architecture {metadata.architecture!r} is not supported; supported: {supported}")
    if metadata.model("expert_count", 0):
        raise metadata.refuse("mixtures of experts are not supported in GGUF files")
    return {**builder(metadata), **_shared(metadata)}


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """`generation_config.json`: which tokens begin and end a text."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    eos_ids = sorted({int(metadata.get(key)) for key in keys if metadata.get(key) is not None})
    config: dict[str, Any] = {}
    if eos_ids:
        config["eos_token_id"] = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if metadata.get(f"tokenizer.ggml.{key}") is not None:
            config[name] = int(metadata.get(f"tokenizer.ggml.{key}"))
    return config


def _shared(metadata: Metadata) -> dict[str, Any]:
    """What every configuration says alike."""
    embedding = metadata.header.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.refuse("tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not metadata.has("output.weight"),
        **generation_config(metadata),
    }


def head_dim(metadata: Metadata) -> int:
    hidden_size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    return metadata.integer("attention.key_length", hidden_size // num_heads)


def _sizes(metadata: Metadata) -> dict[str, Any]:
    num_heads = metadata.integer("attention.head_count")
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
    }


def _llama_like(metadata: Metadata, class_name: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **_sizes(metadata),
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(metadata, head_dim(metadata)),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
    }


def _llama(metadata: Metadata) -> dict[str, Any]:
    return {**_llama_like(metadata, "LlamaForCausalLM", "llama"), "mlp_bias": metadata.has("blk.0.ffn_gate.bias")}


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return _llama_like(metadata, "Qwen2ForCausalLM", "qwen2")


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return _llama_like(metadata, "Qwen3ForCausalLM", "qwen3")


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    return _llama_like(metadata, "Olmo2ForCausalLM", "olmo2")


def _phi3(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    return {**_llama_like(metadata, "Phi3ForCausalLM", "phi3"), "sliding_window": window or None}


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return {**_llama_like(metadata, "GemmaForCausalLM", "gemma"), "hidden_act": "gelu_pytorch_tanh"}


def _newer_gemma(metadata: Metadata, class_name: str, model_type: str) -> dict[str, Any]:
    config = _llama_like(metadata, class_name, model_type)
    is_largest = config["num_hidden_layers"] == GEMMA_LARGEST_LAYERS[metadata.architecture]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_largest
        else config["head_dim"],
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_newer_gemma(metadata, "Gemma2ForCausalLM", "gemma2"),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    config = _newer_gemma(metadata, "Gemma3ForCausalLM", "gemma3_text")
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)}
    pattern = metadata.model("attention.sliding_window_pattern", GEMMA3_PERIOD)
    num_layers = config["num_hidden_layers"]
    is_sliding = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(num_layers)]
    return {
        **config,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in is_sliding],
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _with_layer_norm(metadata: Metadata, class_name: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **_sizes(metadata),
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "rope_parameters": rope_parameters(metadata, head_dim(metadata)),
    }


def _phi2(metadata: Metadata) -> dict[str, Any]:
    return {**_with_layer_norm(metadata, "PhiForCausalLM", "phi"), "hidden_act": "gelu_new"}


def _gpt_neox(metadata: Metadata) -> dict[str, Any]:
    return {
        **_with_layer_norm(metadata, "GPTNeoXForCausalLM", "gpt_neox"),
        "hidden_act": "gelu",
        "use_parallel_residual": bool(metadata.model("use_parallel_residual", True)),
        "attention_bias": metadata.has("blk.0.attn_qkv.bias"),
    }


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    return {
        **_with_layer_norm(metadata, "StableLmForCausalLM", "stablelm"),
        "hidden_act": "silu",
        "use_qkv_bias": metadata.has("blk.0.attn_q.bias"),
        "qk_layernorm": metadata.has("blk.0.attn_q_norm.weight"),
        # The metadata say true for models that are not: there is one norm or there are two.
        "use_parallel_residual": not metadata.has("blk.0.ffn_norm.weight"),
    }


def _command_r(metadata: Metadata) -> dict[str, Any]:
    return {
        **_with_layer_norm(metadata, "CohereForCausalLM", "cohere"),
        "hidden_act": "silu",
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def _falcon(metadata: Metadata) -> dict[str, Any]:
    num_kv_heads = metadata.integer("attention.head_count_kv")
    has_two_norms = metadata.has("blk.0.attn_norm_2.weight")
    return {
        **_with_layer_norm(metadata, "FalconForCausalLM", "falcon"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "activation": "gelu",
        "ffn_hidden_size": metadata.integer("feed_forward_length"),
        "new_decoder_architecture": has_two_norms or num_kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "num_kv_heads": num_kv_heads,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def _gpt2_like(metadata: Metadata, class_name: str, model_type: str, activation: str) -> dict[str, Any]:
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "n_embd": metadata.integer("embedding_length"),
        "n_layer": metadata.integer("block_count"),
        "n_head": metadata.integer("attention.head_count"),
        "n_positions": metadata.integer("context_length"),
        "n_inner": metadata.integer("feed_forward_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "activation_function": activation,
    }


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    return _gpt2_like(metadata, "GPT2LMHeadModel", "gpt2", "gelu_new")


def _starcoder(metadata: Metadata) -> dict[str, Any]:
    config = _gpt2_like(metadata, "GPTBigCodeForCausalLM", "gpt_bigcode", "gelu_pytorch_tanh")
    return {**config, "multi_query": metadata.integer("attention.head_count_kv", 1) == 1}


def _bloom(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "seq_length": metadata.integer("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


def _mpt(metadata: Metadata) -> dict[str, Any]:
    hidden_size = metadata.integer("embedding_length")
    clip = metadata.number("attention.clamp_kqv", 0.0)
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": hidden_size,
        "n_layers": metadata.integer("block_count"),
        "n_heads": metadata.integer("attention.head_count"),
        "max_seq_len": metadata.integer("context_length"),
        "expansion_ratio": metadata.integer("feed_forward_length") // hidden_size,
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "attn_config": {
            "clip_qkv": clip or None,
            "alibi": metadata.number("attention.max_alibi_bias", 0.0) > 0,
            "alibi_bias_max": metadata.number("attention.max_alibi_bias", 8.0),
        },
    }


BUILDERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "bloom": _bloom,
    "command-r": _command_r,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "llama": _llama,
    "mpt": _mpt,
    "olmo2": _olmo2,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "stablelm": _stablelm,
    "starcoder": _starcoder,
}
