"""Configurations of GGUF architectures with LayerNorms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock_server.weights.gguf.decoder import has_qkv_bias, layer_types, with_layer_norm
from penstock_server.weights.gguf.metadata import Metadata

COHERE2_PERIOD = 4  # the last layer of every 4 has full attention
STARCODER2_WINDOW = 4096  # the window of all published models; files lack it


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


def _cohere(metadata: Metadata, class_name: str, model_type: str, **more: Any) -> dict[str, Any]:
    scale, bias = metadata.number("logit_scale"), has_qkv_bias(metadata)
    own = {"hidden_act": "silu", "logit_scale": scale, "attention_bias": bias}
    return with_layer_norm(metadata, class_name, model_type, **own, **more)


def _command_r(metadata: Metadata) -> dict[str, Any]:
    has_norm = metadata.has("blk.0.attn_q_norm.weight")
    return _cohere(metadata, "CohereForCausalLM", "cohere", use_qk_norm=has_norm)


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    window, types = metadata.integer("attention.sliding_window"), layer_types(metadata, COHERE2_PERIOD)
    return _cohere(metadata, "Cohere2ForCausalLM", "cohere2", sliding_window=window, layer_types=types)


def _falcon(metadata: Metadata) -> dict[str, Any]:
    num_kv_heads = metadata.integer("attention.head_count_kv")
    has_two_norms = metadata.has("blk.0.attn_norm_2.weight")
    return with_layer_norm(
        metadata,
        "FalconForCausalLM",
        "falcon",
        layer_norm_epsilon=metadata.number("attention.layer_norm_epsilon"),
        activation="gelu",
        ffn_hidden_size=metadata.integer("feed_forward_length"),
        new_decoder_architecture=has_two_norms or num_kv_heads > 1,
        num_ln_in_parallel_attn=2 if has_two_norms else 1,
        num_kv_heads=num_kv_heads,
        multi_query=True,
        parallel_attn=True,
        alibi=False,
        bias=False,
    )


def _gpt2_like(
    metadata: Metadata, class_name: str, model_type: str, activation: str = "gelu_new", **more: Any
) -> dict[str, Any]:
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
        **more,
    }


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    return _gpt2_like(metadata, "GPT2LMHeadModel", "gpt2")


def _gptj(metadata: Metadata) -> dict[str, Any]:
    return _gpt2_like(metadata, "GPTJForCausalLM", "gptj", rotary_dim=metadata.integer("rope.dimension_count"))


def _gpt_neox(metadata: Metadata) -> dict[str, Any]:
    return with_layer_norm(
        metadata,
        "GPTNeoXForCausalLM",
        "gpt_neox",
        hidden_act="gelu",
        use_parallel_residual=bool(metadata.model("use_parallel_residual", True)),
        attention_bias=has_qkv_bias(metadata),
    )


def _jais2(metadata: Metadata) -> dict[str, Any]:
    biases = {"attention_bias": has_qkv_bias(metadata), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}
    return with_layer_norm(metadata, "Jais2ForCausalLM", "jais2", hidden_act="relu2", **biases)


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


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    config = with_layer_norm(metadata, "NemotronForCausalLM", "nemotron", hidden_act="relu2")
    config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # the default of the class is 0.5
    return {**config, "norm_eps": config["layer_norm_eps"], "attention_bias": has_qkv_bias(metadata)}


def _olmo(metadata: Metadata) -> dict[str, Any]:
    clip = metadata.number("attention.clamp_kqv", 0.0)
    return with_layer_norm(metadata, "OlmoForCausalLM", "olmo", hidden_act="silu", clip_qkv=clip or None)


def _phi2(metadata: Metadata) -> dict[str, Any]:
    return with_layer_norm(metadata, "PhiForCausalLM", "phi", hidden_act="gelu_new")


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    return with_layer_norm(
        metadata,
        "StableLmForCausalLM",
        "stablelm",
        hidden_act="silu",
        use_qkv_bias=metadata.has("blk.0.attn_q.bias"),
        qk_layernorm=metadata.has("blk.0.attn_q_norm.weight"),
        # The metadata claim it for all models. A parallel residual has one norm, a sequential one two.
        use_parallel_residual=not metadata.has("blk.0.ffn_norm.weight"),
    )


def _starcoder(metadata: Metadata) -> dict[str, Any]:
    config = _gpt2_like(metadata, "GPTBigCodeForCausalLM", "gpt_bigcode", "gelu_pytorch_tanh")
    return {**config, "multi_query": metadata.integer("attention.head_count_kv", 1) == 1}


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", STARCODER2_WINDOW)
    config = with_layer_norm(metadata, "Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh")
    return {
        **config,
        "norm_epsilon": config["layer_norm_eps"],
        "use_bias": has_qkv_bias(metadata),
        "sliding_window": window,
    }


BUILDERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "bloom": _bloom,
    "cohere2": _cohere2,
    "command-r": _command_r,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gptj": _gptj,
    "gptneox": _gpt_neox,
    "jais2": _jais2,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "phi2": _phi2,
    "stablelm": _stablelm,
    "starcoder": _starcoder,
    "starcoder2": _starcoder2,
}
