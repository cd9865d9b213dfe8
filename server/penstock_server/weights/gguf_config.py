"""GGUF metadata → the `config.json` and `generation_config.json` of a Hugging Face folder. Imports no torch.

One builder for each GGUF architecture; an architecture without one is refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.gguf_header import GgufHeader

# Llama 3 files carry its rope scaling only as a table of divisors. Meta published two factors with these constants.
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_TOKENS = 1.0, 4.0, 8192
F32 = 0  # GGMLQuantizationType


class Metadata:
    """The metadata of one file, with errors that name the file and the key."""

    def __init__(self, header: GgufHeader, path: Path) -> None:
        self.header = header
        self.path = path
        self.architecture = str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(key, default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks the metadata {key}")
        return value

    def model(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section."""
        return self.get(f"{self.architecture}.{key}", default)

    def require_model(self, key: str) -> Any:
        return self.require(f"{self.architecture}.{key}")

    def refuse(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}")


def model_config(metadata: Metadata) -> dict[str, Any]:
    """`config.json`. Raises ConfigError for an architecture or a feature that is not supported."""
    builder = BUILDERS.get(metadata.architecture)
    if builder is None:
        supported = ", ".join(sorted(BUILDERS))
        raise metadata.refuse(f"GGUF architecture {metadata.architecture!r} is not supported; supported: {supported}")
    return builder(metadata)


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


def _decoder_config(metadata: Metadata) -> dict[str, Any]:
    """What Llama and its relatives share."""
    if metadata.model("expert_count", 0):
        raise metadata.refuse("mixtures of experts are not supported in GGUF files")
    embedding = metadata.header.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.refuse("tensor token_embd.weight is missing")
    hidden_size = int(metadata.require_model("embedding_length"))
    num_heads = int(metadata.require_model("attention.head_count"))
    head_dim = int(metadata.model("attention.key_length", hidden_size // num_heads))
    rope_dim = int(metadata.model("rope.dimension_count", head_dim))
    if rope_dim != head_dim:
        raise metadata.refuse(f"rope over {rope_dim} of {head_dim} dimensions is not supported")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.require_model("feed_forward_length")),
        "num_hidden_layers": int(metadata.require_model("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.model("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.require_model("context_length")),
        "rms_norm_eps": _shortest_float32(metadata.require_model("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(metadata, head_dim),
        "tie_word_embeddings": "output.weight" not in metadata.header.tensors,
        **generation_config(metadata),
    }


def _llama_config(metadata: Metadata) -> dict[str, Any]:
    names = metadata.header.tensors
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        **_decoder_config(metadata),
    }


def _qwen2_config(metadata: Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_decoder_config(metadata)}


BUILDERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {"llama": _llama_config, "qwen2": _qwen2_config}


def _rope_parameters(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    theta = _shortest_float32(metadata.model("rope.freq_base", 10000.0))
    kind = metadata.model("rope.scaling.type", "none")
    # Files from before `rope.scaling` carry a linear factor under this key.
    old_factor = metadata.model("rope.scale_linear", 1.0)
    if kind == "linear" or (kind == "none" and old_factor not in (0.0, 1.0)):
        factor = metadata.model("rope.scaling.factor", old_factor)
        return {"rope_type": "linear", "rope_theta": theta, "factor": _shortest_float32(factor)}
    if kind != "none":
        raise metadata.refuse(f"rope scaling {kind!r} is not supported; supported: none, linear, llama3")
    if "rope_freqs.weight" in metadata.header.tensors:
        return _llama3_rope(metadata, head_dim, theta)
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(metadata: Metadata, head_dim: int, theta: float) -> dict[str, Any]:
    """The parameters whose divisors are the file's table; refuses a table that no published parameters make."""
    info = metadata.header.tensors["rope_freqs.weight"]
    if info.type_number != F32 or info.shape != (head_dim // 2,):
        raise metadata.refuse("rope_freqs.weight is not a float32 table of half a head's dimensions")
    with metadata.path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(4 * (head_dim // 2))
    if len(data) != 4 * (head_dim // 2):
        raise metadata.refuse("the file is truncated: rope_freqs.weight ends beyond it")
    table = struct.unpack(f"<{head_dim // 2}f", data)
    factor = _shortest_float32(max(table))
    made = _llama3_divisors(head_dim, theta, factor)
    if any(not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(table, made, strict=True)):
        raise metadata.refuse("rope_freqs.weight is not the table of Llama 3's rope scaling, and no other is supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_TOKENS,
    }


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> list[float]:
    low = LLAMA3_ORIGINAL_TOKENS / LLAMA3_LOW_FREQ_FACTOR
    high = LLAMA3_ORIGINAL_TOKENS / LLAMA3_HIGH_FREQ_FACTOR
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(factor)
        else:
            smooth = (LLAMA3_ORIGINAL_TOKENS / wavelength - LLAMA3_LOW_FREQ_FACTOR) / (
                LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR
            )
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _shortest_float32(value: float) -> float:
    """The number somebody typed before it was stored as float32: 9.999999747378752e-06 → 1e-05."""
    stored = struct.pack("<f", value)
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == stored:
            return shorter
    return float(value)
