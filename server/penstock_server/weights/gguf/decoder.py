"""Configuration entries that several GGUF architectures share. Imports no torch."""

from __future__ import annotations

from typing import Any

from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.rope import rope_parameters


def num_layers(metadata: Metadata) -> int:
    """The model's layers, without the multi-token prediction layers that follow them."""
    return metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)


def head_dim(metadata: Metadata) -> int:
    """The size of an attention head."""
    hidden_size, num_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    return metadata.size("attention.key_length", hidden_size // num_heads)


def has_qkv_bias(metadata: Metadata) -> bool:
    """Whether queries, keys and values have biases."""
    return metadata.has("blk.0.attn_q.bias") or metadata.has("blk.0.attn_qkv.bias")


def sizes(metadata: Metadata) -> dict[str, Any]:
    """The dimensions of a decoder."""
    num_heads = metadata.integer("attention.head_count")
    return {
        "hidden_size": metadata.integer("embedding_length"),
        # Files lack it where all layers have experts.
        "intermediate_size": metadata.integer("feed_forward_length", metadata.model("expert_feed_forward_length")),
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _most_kv_heads(metadata, num_heads),
        "head_dim": head_dim(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
    }


def _most_kv_heads(metadata: Metadata, num_heads: int) -> int:
    """The KV heads of layers with attention."""
    found = metadata.model("attention.head_count_kv")
    if isinstance(found, list) and 0 in found:
        return max(kv_heads(metadata)) or 1
    return metadata.integer("attention.head_count_kv", num_heads)


def llama_like(metadata: Metadata, class_name: str, model_type: str, **more: Any) -> dict[str, Any]:
    """A decoder with RMS norms and rope. more: entries that differ or are added."""
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **sizes(metadata),
        "hidden_act": "silu",
        "rms_norm_eps": _rms_epsilon(metadata),
        "rope_parameters": rope_parameters(metadata, head_dim(metadata)),
        "attention_bias": has_qkv_bias(metadata),
        **more,
    }


def _rms_epsilon(metadata: Metadata) -> float:
    # COMPAT: newer converters write EXAONE 3's epsilon under the key of LayerNorms.
    is_other = metadata.architecture == "exaone" and metadata.model("attention.layer_norm_rms_epsilon") is None
    return metadata.number("attention.layer_norm_epsilon" if is_other else "attention.layer_norm_rms_epsilon")


def gated_delta(metadata: Metadata) -> dict[str, Any]:
    """The entries of gated delta networks, which replace attention in all layers but every fourth."""
    num_heads, dim = _state_heads(metadata)
    return {
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": dim,
        "full_attention_interval": metadata.integer("full_attention_interval", 4),
    }


def mamba(metadata: Metadata) -> dict[str, Any]:
    """The entries of Mamba in place of attention."""
    return {
        "mamba_expand": metadata.integer("ssm.inner_size") / metadata.size("embedding_length"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_dt_rank": metadata.integer("ssm.time_step_rank"),
        "mamba_conv_bias": _has_convolution_bias(metadata),
    }


def mamba2(metadata: Metadata) -> dict[str, Any]:
    """The entries of Mamba 2 in place of attention."""
    num_heads, dim = _state_heads(metadata)
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": dim,
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_convolution_bias(metadata),
    }


def _has_convolution_bias(metadata: Metadata) -> bool:
    return any(name.endswith("ssm_conv1d.bias") for name in metadata.header.tensors)


def kv_heads(metadata: Metadata) -> list[int]:
    """The KV heads of each layer; 0: it has no attention. Raises ConfigError if those of layers differ."""
    return _of_layers(metadata, "attention.head_count_kv", "attention")


def mlp_widths(metadata: Metadata) -> list[int]:
    """The intermediate size of each layer; 0: it has no MLP. Raises ConfigError if those of layers differ."""
    return _of_layers(metadata, "feed_forward_length", "an MLP")


def _of_layers(metadata: Metadata, key: str, part: str) -> list[int]:
    """The value of each layer, which is equal in all that have the part, and 0 in others."""
    num, found = num_layers(metadata), metadata.require_model(key)
    values = found[:num] if isinstance(found, list) else [found] * num
    if len({*values} - {0}) > 1:
        raise metadata.error(f"{metadata.architecture}.{key} differs between layers with {part}")
    return values


def _state_heads(metadata: Metadata) -> tuple[int, int]:
    """The heads that keep a state, and the size of one."""
    num_heads, inner_size = metadata.size("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if inner_size % num_heads:
        raise metadata.error(f"ssm.inner_size {inner_size} is not a multiple of ssm.time_step_rank {num_heads}")
    return num_heads, inner_size // num_heads


def with_layer_norm(metadata: Metadata, class_name: str, model_type: str, **more: Any) -> dict[str, Any]:
    """A decoder with LayerNorms and rope. more: entries that differ or are added."""
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **sizes(metadata),
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "rope_parameters": rope_parameters(metadata, head_dim(metadata)),
        **more,
    }


def layer_types(metadata: Metadata, period: int) -> list[str]:
    """The attention type of each layer: from the file, or sliding except for the last layer of every `period`."""
    pattern, num = metadata.model("attention.sliding_window_pattern", period), num_layers(metadata)
    is_sliding = pattern[:num] if isinstance(pattern, list) else [bool((index + 1) % pattern) for index in range(num)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]
