"""Writes tiny GGUF files from transformers models, as llama.cpp's converter would."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf_tensors import gguf_tensors
from model_driver import ModelDriver
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.tokenizer.byte_level import byte_spelling

TOKENS = ["<|end|>", "<|user|>", "<tool>", *byte_spelling().values(), "he", "ll", "Ġw", "hell", "12"]
MERGES = ["h e", "l l", "Ġ w", "he ll", "1 2"]


def tokenizer_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer with two control tokens and a user-defined token."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **changes,
    }


# llama.cpp's key → the possible names in transformers.
CONFIG_KEYS = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("ffn_hidden_size", "n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.scale": ("attention_multiplier",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
}


def model_metadata(config: transformers.PretrainedConfig, architecture: str) -> dict[str, Any]:
    """The metadata that all architectures share, as far as the configuration has them."""
    values: dict[str, Any] = {}
    for key, names in CONFIG_KEYS.items():
        found = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        if found:
            values[key] = found[0]
    values.setdefault("feed_forward_length", 4 * config.hidden_size)
    if "ssm.time_step_rank" in values:
        values["full_attention_interval"] = config.layer_types.index("full_attention") + 1
        values["ssm.inner_size"] = values["ssm.time_step_rank"] * config.linear_value_head_dim
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        values["rope.freq_base"] = float(rope["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    elif getattr(config, "rotary_dim", None):
        values["rope.dimension_count"] = config.rotary_dim
    return {f"{architecture}.{key}": value for key, value in values.items()}


def raw_writer(path: Path, metadata: dict[str, Any]) -> gguf.GGUFWriter:
    metadata = dict(metadata)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(key, value)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Types that the gguf package only reads: where a block has the float16 factors of its scales and of its mins, and
# how much the mins of random blocks weigh for their weights to have a mean of about 0.
FACTORS = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}


# What layers have that keep a state, besides projections.
CONVOLUTIONS = ("conv.weight", "ssm_conv1d.weight", *(f"ssm_conv1d_{name}.weight" for name in "qkv"))
NEVER_QUANTIZED = (*CONVOLUTIONS, "ssm_a", "ssm_d", "ssm_norm.weight")


def random_blocks(shape: tuple[int, ...], kind: str, deviation: float, seed: int) -> np.ndarray:
    """Blocks of a type in FACTORS with random codes and scales. Each has weights of this standard deviation."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    scale_at, min_at, ratio = FACTORS[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (math.prod(shape) // weights, num_bytes), dtype=np.uint8)

    def put(at: int | None, factors: np.ndarray) -> None:
        if at is not None:
            blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8).reshape(-1, 2)

    ones = np.ones(len(blocks))
    put(scale_at, ones)
    put(min_at, ones * ratio)
    factors = deviation / gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).std(axis=1)
    put(scale_at, factors)
    put(min_at, factors * ratio)
    return blocks.reshape(*shape[:-1], shape[-1] // weights * num_bytes)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """Writes a file with matrices of type `kind` and vectors in float32. Matrices of types in FACTORS have random
    blocks with the standard deviations of the given ones."""
    writer = raw_writer(path, metadata)
    type_ = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if array.ndim == 1 or kind == "F32" or name.endswith(NEVER_QUANTIZED):
            writer.add_tensor(name, array.astype(np.float32))
        elif kind in FACTORS:
            blocks = random_blocks(array.shape, kind, float(array.std()), zlib.crc32(name.encode()))
            writer.add_tensor(name, blocks, raw_dtype=type_)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    finish(writer)
    return path


def save_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    old_layout: bool = False,
    **changes: Any,
) -> Path:
    """Writes the model as a GGUF file. changes: extra metadata; None removes a key, an array becomes a tensor."""
    metadata = {
        "general.architecture": architecture,
        **model_metadata(model.config, architecture),
        **tokenizer_metadata(),
        **changes,
    }
    tensors = gguf_tensors(model, architecture, old_layout)
    tensors |= {key: value for key, value in metadata.items() if isinstance(value, np.ndarray)}
    tensors = {key: value for key, value in tensors.items() if key not in metadata or metadata[key] is not None}
    values = {key: value for key, value in metadata.items() if value is not None and key not in tensors}
    return write_gguf(path, values, tensors, kind)


def mixtral_file(path: Path, kind: str = "F32", **changes: Any) -> Path:
    """A random Mixtral with two layers of four experts. changes: as for `save_gguf`."""
    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=64, sliding_window=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save_gguf(model.eval(), path, "llama", kind, **changes)


def logits_of(folder: Path, text: list[int]) -> torch.Tensor:
    """The logits of a prepared folder's model, dequantized, at every token of the text: [tokens, vocab]."""
    model = load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 4, dequantize=True), RankGroup())
    driver = ModelDriver(model)
    return driver.step([(driver.sequence(text), len(text))], every_row=True)
