"""Tiny configurations of any causal model of transformers, made from its defaults: what has a size gets a small one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from penstock_server.models.registry import ARCHITECTURES
from penstock_server.models.support import builtin_class

VOCAB = 131
MAX_PARAMETERS = 4_000_000
# By what configurations call them. Where a default is None or of another type it stays.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "v_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention_window"), 12),
    "rotary_dim": 8,
}
# Lists with an entry for each layer: the first two kinds of the default's.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")


def model_types() -> list[str]:
    """Those of transformers' causal models that have no decoder of ours."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return sorted(set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ARCHITECTURES))


def tiny_config(model_type: str) -> transformers.PreTrainedConfig:
    """Raises what transformers raises where it does not take the small sizes."""
    default = transformers.AutoConfig.for_model(model_type)
    config = type(default)(**small(default))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, key, None) is not None:
            setattr(config, key, None)
    return config


def small(default: transformers.PreTrainedConfig) -> dict[str, Any]:
    """What to give to the class of a configuration to get a small one."""
    values: dict[str, Any] = {}
    for key, value in default.to_dict().items():
        if key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            values[key] = min(value, SIZES[key]) if key != "vocab_size" else SIZES[key]
        elif key in PER_LAYER and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            values[key] = (kinds * 2)[:2]
    for key in ("text_config", "decoder"):
        part = getattr(default, key, None)
        if isinstance(part, transformers.PreTrainedConfig):
            values[key] = small(part)
    return values


def make_model(model_type: str, config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """With random weights, in float32. Raises ValueError when it is not tiny, and what transformers raises."""
    model_class: Any = builtin_class(model_type)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"it has {num_parameters:,} parameters")
    torch.manual_seed(len(model_type))
    model: transformers.PreTrainedModel = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
            else:
                parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
    return model.eval()


def vocab_of(config: Mapping[str, Any]) -> int:
    text = config.get("text_config") or {}
    return int(config.get("vocab_size") or text.get("vocab_size") or VOCAB)
