"""Builds `config.json` and `generation_config.json` of a Hugging Face folder from GGUF metadata. Imports no torch.

Each GGUF architecture has a builder; an architecture without one is refused by name. Values that are missing from the
metadata are derived from the tensors, or else taken from llama.cpp's constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.gguf import experts, layer_norm, llama, t5
from penstock_server.weights.gguf.metadata import Metadata, shortest_float32
from penstock_server.weights.gguf.tokenizer import end_token_ids, special_token_id

# The name in `generation_config.json` → llama.cpp's, after `general.sampling.`.
SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}

BUILDERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    **llama.BUILDERS,
    **layer_norm.BUILDERS,
    **experts.BUILDERS,
    "t5": t5.t5,
}


def model_config(metadata: Metadata) -> dict[str, Any]:
    """`config.json`. Raises ConfigError for an architecture or a feature that is not supported."""
    builder = BUILDERS.get(metadata.architecture)
    if builder is None:
        raise unsupported(metadata)
    has_experts = metadata.integer("expert_count", 0) > 0
    if has_experts and metadata.architecture not in experts.BUILDERS:
        supported = ", ".join(sorted(experts.BUILDERS))
        raise metadata.error(f"{metadata.architecture} with experts is not supported; supported: {supported}")
    # GGUF stores gate, up and down of all experts as separate tensors, also where the published model fuses them.
    storage = {"expert_storage": "apart"} if has_experts else {}
    return {**builder(metadata), **storage, **_shared(metadata)}


def unsupported(metadata: Metadata) -> ConfigError:
    """The error for an architecture without a builder."""
    supported = ", ".join(sorted(BUILDERS))
    return metadata.error(f"GGUF architecture {metadata.architecture!r} is not supported; supported: {supported}")


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """`generation_config.json`: special tokens, and the sampling parameters that the model's authors chose."""
    return {**_special_tokens(metadata), **_sampling(metadata)}


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """As llama.cpp's converter has them from the model's own `generation_config.json`. A float that JSON lacks is a
    text, which the server reports and ignores."""
    given = {name: metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}

    def value(given: Any) -> Any:
        if not isinstance(given, float):
            return given
        return shortest_float32(given) if math.isfinite(given) else str(given)

    return {name: value(given) for name, given in given.items() if given is not None}


def _special_tokens(metadata: Metadata) -> dict[str, Any]:
    """The tokens at the beginning and end of a text, and for padding."""
    eos_ids = end_token_ids(metadata)
    config: dict[str, Any] = {}
    if eos_ids:
        config["eos_token_id"] = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    for name, role in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token_id := special_token_id(metadata, role)) is not None:
            config[name] = token_id
    return config


def _shared(metadata: Metadata) -> dict[str, Any]:
    """The entries of every configuration."""
    embedding = metadata.header.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.error("tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not metadata.has("output.weight"),
        **_special_tokens(metadata),
    }
