"""Tries every causal model of transformers without a native decoder as a tiny model over our cache.

Configurations are derived from the defaults by replacing sizes with small ones. A configuration for which this does not
work is reported.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_run import EngineRun
from penstock_server.errors import ConfigError
from penstock_server.models.fallback import Fallback, load_fallback
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import ARCHITECTURES
from penstock_server.models.support import FALLBACK, support_of
from penstock_server.parallel import RankGroup
from penstock_server.vision.family import FAMILIES
from tiny_models import prompts

VOCAB = 131
NUM_TOKENS = 16
MAX_PARAMETERS = 16_000_000
SERVED = "served"
# By configuration key. Defaults that are None or not integers stay.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "v_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 12),
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Lists with an entry per layer, reduced to one of each kind.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
PARTS = ("text_config", "decoder", "vision_config", "audio_config")
# Values that the defaults lack, or that differ from those of published models.
OTHERS: dict[str, dict[str, Any]] = {
    "dots3_note_text": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}


def model_types() -> list[str]:
    """The causal model types of transformers without a native decoder."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    ours = {names[model_type] for model_type in (*ARCHITECTURES, *FAMILIES) if model_type in names}
    # Some types share the configuration class of another type, and are loaded as that type.
    return sorted(name for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if names.get(name) not in ours)


def outcome(model_type: str, folder: Path) -> str:
    """`SERVED`, the reason of a refusal, or "not tried: " and the error of transformers for the tiny configuration.

    Raises AssertionError if the model is served and its tokens differ from those of transformers.
    """
    try:
        default = transformers.AutoConfig.for_model(model_type)
        config = type(default)(**{**small(default), **OTHERS.get(model_type, {})})
        support = support_of(model_type, config.to_dict())
        if support != FALLBACK:
            return support
        reference = make_model(config)
        reference.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - any error: the configuration is a guess
        return f"not tried: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        run = EngineRun(folder, load)
    except ConfigError as error:
        return str(error).split(": ", 1)[1]
    check_tokens(run, reference)
    return SERVED


def small(default: transformers.PreTrainedConfig) -> dict[str, Any]:
    """Arguments for the configuration class that make the model small."""
    values: dict[str, Any] = {}
    for key, value in default.to_dict().items():
        if key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            values[key] = SIZES[key] if key in ("vocab_size", "eos_token_id") else min(value, SIZES[key])
        elif key in PER_LAYER and isinstance(value, list):
            values[key] = (list(dict.fromkeys(value)) * 2)[:2]
    if "kv_lora_rank" in values:  # latent attention has no grouped heads
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    for key in PARTS:
        part = getattr(default, key, None)
        if isinstance(part, transformers.PreTrainedConfig):
            values[key] = small(part)
    return values


def make_model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """In float32 with random weights. Raises ValueError if the model is not tiny."""
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
            else:
                parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
    return model.eval()


@torch.inference_mode()
def load(options: LoadOptions, group: RankGroup) -> Fallback:
    return load_fallback(options, group)


@torch.inference_mode()
def check_tokens(run: EngineRun, reference: transformers.PreTrainedModel) -> None:
    """In chunks and batches, with a shared prefix and a preemption."""
    shared, first, other = prompts(3, [10, 5, 6], VOCAB)
    texts = [first, [*shared, *other[:3]], [*shared, *other[2:]]]
    reference.set_attn_implementation("eager")
    found = run.greedy(texts, NUM_TOKENS, shared_tokens=len(shared), chunk=7)
    for text, tokens in zip(texts, found, strict=True):
        logits = reference(torch.tensor([[*text, *tokens]]), use_cache=False).logits[0]
        assert tokens == logits.argmax(-1)[len(text) - 1 : -1].tolist()
