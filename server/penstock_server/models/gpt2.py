"""GPT-2, and StarCoder (gpt_bigcode): learned positions, LayerNorms with biases, ungated MLPs, fused q, k and v."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location, fused

LAYER = "transformer.h.{i}"


def gpt2(config: Config) -> tuple[ModelSpec, NameMap]:
    layer = _layer(config, "gelu_new")
    scale = layer.plain_attention.scale
    by_depth = config.get("scale_attn_by_inverse_layer_idx", False)
    layers = tuple(
        replace(layer, attention=replace(layer.plain_attention, scale=scale / (i + 1) if by_depth else scale))
        for i in range(config.require("n_layer", int))
    )
    return _model(config, "gpt2", layers), _names(layer.plain_attention, blocks=1, transposed=True)


def gpt_bigcode(config: Config) -> tuple[ModelSpec, NameMap]:
    layer = _layer(config, "gelu_pytorch_tanh")
    if config.get("multi_query", True):
        layer = replace(layer, attention=replace(layer.plain_attention, num_kv_heads=1))
    layers = (layer,) * config.require("n_layer", int)
    names = _names(layer.plain_attention, blocks=layer.plain_attention.num_kv_heads, transposed=False)
    return _model(config, "gpt_bigcode", layers), names


def _layer(config: Config, activation: str) -> LayerSpec:
    if config.get("add_cross_attention", False):
        raise config.refuse("add_cross_attention is not supported")
    num_heads, head_dim = config.heads("n_head", "n_embd")
    scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    attention = AttentionSpec(num_heads, num_heads, head_dim, scale, qkv_bias=True, output_bias=True)
    inner = config.get("n_inner", 4 * config.require("n_embd", int))
    mlp = MlpSpec(inner, config.activation("activation_function", activation), gated=False, bias=True, down_bias=True)
    return LayerSpec(attention, mlp, _norm(config))


def _model(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    num_positions = config.require("n_positions", int)
    return ModelSpec(
        architecture=architecture,
        hidden_size=config.require("n_embd", int),
        max_position_tokens=num_positions,
        embedding=EmbeddingSpec(config.require("vocab_size", int), num_positions=num_positions),
        layers=layers,
        final_norm=_norm(config),
        head=HeadSpec(config.get("tie_word_embeddings", True)),
    )


def _norm(config: Config) -> NormSpec:
    return NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True)


def _names(attention: AttentionSpec, *, blocks: int, transposed: bool) -> NameMap:
    """transposed: GPT-2 stores its matrices as [in, out]."""
    return NameMap(
        names={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "layers.{i}.attention_norm": f"{LAYER}.ln_1",
            **fused("layers.{i}.attention", f"{LAYER}.attn.c_attn", attention.widths, blocks, transposed=transposed),
            "layers.{i}.attention.output": Location(f"{LAYER}.attn.c_proj", transposed),
            "layers.{i}.mlp_norm": f"{LAYER}.ln_2",
            "layers.{i}.mlp.up": Location(f"{LAYER}.mlp.c_fc", transposed),
            "layers.{i}.mlp.down": Location(f"{LAYER}.mlp.c_proj", transposed),
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        # Masks that old exporters saved.
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
        prefix="transformer.",
    )
