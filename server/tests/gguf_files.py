"""Writes tiny GGUF files as llama.cpp's converter would, from models made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from penstock_server.weights.gguf_file import INTERLEAVED, LLAMA_FAMILY_NAMES
from penstock_server.weights.gguf_tokenizer import byte_spelling
from torch import Tensor

TOKENS = ["<|end|>", "<|user|>", "<tool>", *byte_spelling().values(), "he", "ll", "Ġw", "hell", "12"]
MERGES = ["h e", "l l", "Ġ w", "he ll", "1 2"]


def tokenizer_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer with two control tokens and one that a user defined."""
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


def model_metadata(config: transformers.PretrainedConfig, architecture: str) -> dict[str, Any]:
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """Matrices are stored as `kind`, vectors in float32."""
    metadata = dict(metadata)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(key, value)
    type_ = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: transformers.PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """By GGUF's names, q and k rows interleaved where llama.cpp does that."""
    hf_names = {hf: ours for ours, hf in LLAMA_FAMILY_NAMES.items()}
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".")
        layer = parts[2] if parts[:2] == ["model", "layers"] else None
        if layer is not None:
            parts[2] = "{i}"
        gguf_stem = hf_names[".".join(parts)]
        if gguf_stem.split(".")[-1] in INTERLEAVED.get(architecture, ()):
            tensor = interleave(tensor, config.hidden_size // config.num_attention_heads)
        tensors[f"{gguf_stem.replace('{i}', layer or '')}.{suffix}"] = tensor.float().numpy()
    return tensors


def interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (half, pair) to (pair, half)."""
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def save_gguf(
    model: transformers.PreTrainedModel, path: Path, architecture: str = "llama", kind: str = "F32", **changes: Any
) -> Path:
    """The model as a GGUF file; a change to None takes a key away."""
    metadata = {
        "general.architecture": architecture,
        **model_metadata(model.config, architecture),
        **tokenizer_metadata(),
        **changes,
    }
    tensors = gguf_tensors(model, architecture)
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors, kind)
