"""Llama and the architectures that differ from it in flags only: Mistral and Qwen2."""

from __future__ import annotations

import logging

from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap

logger = logging.getLogger(__name__)

NAMES = NameMap(
    names={
        "embedding": "model.embed_tokens",
        "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj",
        "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj",
        "layers.{i}.attention.output": "model.layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj",
        "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj",
        "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    ignored=(
        # Tables that old exporters saved; they are computed from the configuration.
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
        # The second copy of a tied head; an untied one is a parameter and asked for.
        r"lm_head\.weight",
    ),
)


def llama(config: Config) -> ModelSpec:
    bias = config.get("attention_bias", False)
    return _spec(config, "llama", qkv_bias=bias, attention_output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def mistral(config: Config) -> ModelSpec:
    # COMPAT: a configuration that does not speak of the window has transformers' default; one that says null has none.
    window = config.optional_int("sliding_window") if "sliding_window" in config.values else 4096
    return _spec(config, "mistral", window=window)


def qwen2(config: Config) -> ModelSpec:
    window = config.optional_int("sliding_window") if config.get("use_sliding_window", False) else None
    return _spec(config, "qwen2", qkv_bias=True, window=window)


def _spec(
    config: Config,
    architecture: str,
    *,
    qkv_bias: bool = False,
    attention_output_bias: bool = False,
    mlp_bias: bool = False,
    window: int | None = None,
) -> ModelSpec:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.refuse(f"hidden_act {activation!r} is not supported for {architecture}; supported: silu")
    num_heads = config.require("num_attention_heads", int)
    if num_heads < 1:
        raise config.refuse(f"num_attention_heads must be at least 1, not {num_heads}")
    hidden_size = config.require("hidden_size", int)
    head_dim = config.get("head_dim", hidden_size // num_heads)
    max_position_tokens = config.require("max_position_embeddings", int)
    if window is not None and window < max_position_tokens:
        # Inside the window a sliding-window model is an ordinary one, so sequences up to it are exact.
        logger.warning(
            "sliding windows are not supported yet: sequences are limited to the window of %d tokens", window
        )
        max_position_tokens = window
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.require("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=config.require("intermediate_size", int),
        num_layers=config.require("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=config.rope(head_dim),
        max_position_tokens=max_position_tokens,
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=mlp_bias,
    )
