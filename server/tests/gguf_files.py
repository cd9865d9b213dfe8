"""Writes tiny GGUF files as llama.cpp's converter would, from models made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from penstock_server.tokenizer.byte_level import byte_spelling
from penstock_server.weights.gguf_file import COUNTED_FROM_ZERO, INTERLEAVED
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


# llama.cpp's key → what transformers calls it, one of these.
CONFIG_KEYS = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("ffn_hidden_size", "n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "use_parallel_residual": ("use_parallel_residual",),
}


def model_metadata(config: transformers.PretrainedConfig, architecture: str) -> dict[str, Any]:
    """What the files of every architecture say alike, as far as the configuration knows it."""
    values: dict[str, Any] = {}
    for key, names in CONFIG_KEYS.items():
        found = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        if found:
            values[key] = found[0]
    values.setdefault("feed_forward_length", 4 * config.hidden_size)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        values["rope.freq_base"] = float(rope["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
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


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """Matrices are stored as `kind`, vectors in float32."""
    writer = raw_writer(path, metadata)
    type_ = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    finish(writer)
    return path


def gguf_tensors(model: transformers.PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """By GGUF's names, from the tables of its own package, and in the order that llama.cpp's converter gives rows."""
    config = model.config
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        is_tied = config.tie_word_embeddings and name in ("lm_head.weight", "embed_out.weight")
        if is_tied or name.endswith((".attn.bias", ".masked_bias", "inv_freq")):
            continue
        if ".norms." in name:  # StableLM's, a tensor for each head
            name = name.partition(".norms.")[0]
            heads = [value for key, value in model.state_dict().items() if key.startswith(f"{name}.norms.")]
            name, tensor = f"{name}.weight", torch.stack(heads)
        # BLOOM's converter takes the prefix away first.
        names = (name, name.removeprefix("transformer."))
        gguf_name = next(filter(None, (table.get_name(each, (".weight", ".bias")) for each in names)), None)
        assert gguf_name is not None, name
        tensors[gguf_name] = converted(tensor, gguf_name, config, architecture).float().numpy()
    return tensors


def converted(tensor: Tensor, name: str, config: Any, architecture: str) -> Tensor:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    stem = name.split(".")[-2]
    if stem in INTERLEAVED.get(architecture, ()):
        return interleave(tensor, head_dim)
    if architecture in COUNTED_FROM_ZERO and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return tensor.t() if tensor.dim() == 2 else tensor
    if architecture in ("falcon", "bloom", "gptneox") and stem == "attn_qkv":
        groups = config.num_attention_heads
        if architecture == "falcon":
            groups = config.num_kv_heads if config.new_decoder_architecture else 1
        blocks = tensor.reshape(groups, -1, head_dim, *tensor.shape[1:])
        return torch.cat([part.flatten(0, 2) for part in (blocks[:, :-2], blocks[:, -2:-1], blocks[:, -1:])])
    return tensor


def interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (half, pair) to (pair, half)."""
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def save_gguf(
    model: transformers.PreTrainedModel, path: Path, architecture: str = "llama", kind: str = "F32", **changes: Any
) -> Path:
    """The model as a GGUF file; a change to None takes a key away, one to an array is a tensor."""
    metadata = {
        "general.architecture": architecture,
        **model_metadata(model.config, architecture),
        **tokenizer_metadata(),
        **changes,
    }
    tensors = gguf_tensors(model, architecture)
    tensors |= {key: value for key, value in metadata.items() if isinstance(value, np.ndarray)}
    values = {key: value for key, value in metadata.items() if value is not None and key not in tensors}
    return write_gguf(path, values, tensors, kind)
