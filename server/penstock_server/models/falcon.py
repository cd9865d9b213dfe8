"""Falcon in three layouts: 7B (one KV head), 40B (grouped heads, two norms; 11B has one), RW (ALiBi, sequential)."""

from __future__ import annotations

from penstock_server.device.attention.interface import Alibi
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.alibi import alibi_slopes
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "transformer.h.{i}"


def falcon(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(max_position_embeddings=2048)
    is_grouped = config.get("new_decoder_architecture", False)
    # In the new architecture attention and MLP are parallel, whatever `parallel_attn` says.
    is_parallel = is_grouped or config.get("parallel_attn", True)
    if is_grouped and not config.get("parallel_attn", True):
        raise config.refuse("new_decoder_architecture without parallel_attn is not supported")
    num_norms = config.get("num_ln_in_parallel_attn", 2 if is_grouped else 1)
    if num_norms == 2 and is_parallel and not is_grouped:
        raise config.refuse("num_ln_in_parallel_attn 2 without new_decoder_architecture is not supported")
    attention = _attention(config, is_grouped)
    hidden_size = config.require("hidden_size", int)
    bias = config.get("bias", False)
    inner, activation = config.get("ffn_hidden_size", 4 * hidden_size), config.activation("activation", "gelu")
    mlp = MlpSpec(inner, activation, gated=False, bias=bias, down_bias=bias)
    norm = NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(attention, mlp, norm, parallel=is_parallel, shares_norm=is_parallel and num_norms == 1)
    spec = ModelSpec(
        architecture="falcon",
        hidden_size=hidden_size,
        max_position_tokens=config.max_position_tokens,
        default_position_tokens=config.default_position_tokens,
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=(layer,) * config.require("num_hidden_layers", int),
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", True)),
    )
    return spec, _names(attention, is_parallel and num_norms == 2)


def refined_web(config: Config) -> tuple[ModelSpec, NameMap]:
    """Falcon's first name: RefinedWeb has grouped heads (40B), RefinedWebModel one KV head (7B) or all (RW)."""
    config = config.renamed(num_hidden_layers="n_layer", num_attention_heads="n_head", num_kv_heads="n_head_kv")
    config = config.with_defaults(multi_query=False)
    has_groups = config.optional_int("num_kv_heads") is not None and not config.get("multi_query", False)
    is_grouped = config.require("model_type", str) == "RefinedWeb" or has_groups
    return falcon(config.with_defaults(new_decoder_architecture=is_grouped, parallel_attn=is_grouped))


def _attention(config: Config, is_grouped: bool) -> AttentionSpec:
    num_heads, head_dim = config.heads()
    num_kv_heads = num_heads
    if is_grouped:
        num_kv_heads = config.get("num_kv_heads", num_heads)
    elif config.get("multi_query", True):
        num_kv_heads = 1
    scale, bias = head_dim**-0.5, config.get("bias", False)
    has_alibi = config.get("alibi", False)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        rope=None if has_alibi else read_rope(config, head_dim),
        qkv_bias=bias,
        output_bias=bias,
        alibi=Alibi(alibi_slopes(num_heads), is_scaled=True, is_bfloat16=True) if has_alibi else None,
    )


def _names(attention: AttentionSpec, has_two_norms: bool) -> NameMap:
    qkv = f"{LAYER}.self_attention.query_key_value"
    return NameMap(
        names={
            "embedding": "transformer.word_embeddings",
            "layers.{i}.attention_norm": f"{LAYER}.{'ln_attn' if has_two_norms else 'input_layernorm'}",
            **fused("layers.{i}.attention", qkv, attention.widths, attention.num_kv_heads),
            "layers.{i}.attention.output": f"{LAYER}.self_attention.dense",
            "layers.{i}.mlp_norm": f"{LAYER}.{'ln_mlp' if has_two_norms else 'post_attention_layernorm'}",
            "layers.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
            "layers.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        ignored=(r"transformer\.h\.\d+\.self_attention\.(maybe_)?rotary(_emb)?\.inv_freq",),
        prefix="transformer.",
    )
