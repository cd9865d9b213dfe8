"""GPT-Neo: GPT-2 with separate projections, unscaled scores, and a sliding window on some layers."""

from __future__ import annotations

from typing import Any

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.context import stated_tokens
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap

LAYER = "transformer.h.{i}"
NAMES = NameMap(
    names={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.{i}.attention_norm": f"{LAYER}.ln_1",
        "layers.{i}.attention.q": f"{LAYER}.attn.attention.q_proj",
        "layers.{i}.attention.k": f"{LAYER}.attn.attention.k_proj",
        "layers.{i}.attention.v": f"{LAYER}.attn.attention.v_proj",
        "layers.{i}.attention.output": f"{LAYER}.attn.attention.out_proj",
        "layers.{i}.mlp_norm": f"{LAYER}.ln_2",
        "layers.{i}.mlp.up": f"{LAYER}.mlp.c_fc",
        "layers.{i}.mlp.down": f"{LAYER}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    # Masks that old exporters saved.
    ignored=(r"transformer\.h\.\d+\.attn\.attention\.bias",),
    prefix="transformer.",
)


def gpt_neo(config: Config) -> tuple[ModelSpec, NameMap]:
    num_heads, head_dim = config.heads("num_heads")
    hidden_size = config.require("hidden_size", int)
    num_positions = stated_tokens(config)
    activation = config.activation("activation_function", "gelu_new")
    inner = config.get("intermediate_size", 4 * hidden_size)
    mlp = MlpSpec(inner, activation, gated=False, bias=True, down_bias=True)
    norm = NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True)
    window = config.with_defaults(window_size=256).window("window_size")
    layers = tuple(
        LayerSpec(
            AttentionSpec(num_heads, num_heads, head_dim, scale=1.0, output_bias=True, mask=AttentionMask(width)),
            mlp,
            norm,
        )
        for width in (window if kind == "local" else None for kind in _kinds(config))
    )
    spec = ModelSpec(
        architecture="gpt_neo",
        hidden_size=hidden_size,
        max_position_tokens=num_positions,
        embedding=EmbeddingSpec(config.require("vocab_size", int), num_positions=num_positions),
        layers=layers,
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", True)),
    )
    return spec, NAMES


def _kinds(config: Config) -> list[str]:
    """ "global" or "local" for each layer. attention_types [[["global", "local"], 12]] repeats the pair twelve
    times."""
    num = config.require("num_layers", int)
    types: Any = config.values.get("attention_types") or [[["global", "local"], 12]]
    try:
        kinds = [kind for pattern, count in types for _ in range(count) for kind in pattern]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num or any(kind not in ("global", "local") for kind in kinds):
        raise config.refuse(f"attention_types must name {num} layers, each global or local, not {types!r}")
    return kinds
