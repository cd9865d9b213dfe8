"""BLOOM: ALiBi, a norm after the embedding, q, k and v fused per head."""

from __future__ import annotations

from penstock_server.device.attention.interface import Alibi
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.alibi import alibi_slopes
from penstock_server.models.config import Config
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "transformer.h.{i}"
# ALiBi has no limit. Some configurations state `seq_length`.
DEFAULT_MAX_POSITION_TOKENS = 2048


def bloom(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: published configurations use either of two names for these keys.
    names = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    config = Config(
        {**config.values, **{names.get(key, key): value for key, value in config.values.items()}}, config.path
    )
    num_heads, head_dim = config.heads()
    hidden_size = config.require("hidden_size", int)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=True,
        output_bias=True,
        alibi=Alibi(alibi_slopes(num_heads)),
    )
    mlp = MlpSpec(4 * hidden_size, "gelu_pytorch_tanh", gated=False, bias=True, down_bias=True)
    norm = NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True)
    is_normed = config.get("apply_residual_connection_post_layernorm", False)
    spec = ModelSpec(
        architecture="bloom",
        hidden_size=hidden_size,
        max_position_tokens=config.get("seq_length", DEFAULT_MAX_POSITION_TOKENS),
        embedding=EmbeddingSpec(config.require("vocab_size", int), norm=norm),
        layers=(LayerSpec(attention, mlp, norm, residual_is_normed=is_normed),)
        * config.require("num_hidden_layers", int),
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", True)),
    )
    return spec, _names(attention)


def _names(attention: AttentionSpec) -> NameMap:
    qkv = f"{LAYER}.self_attention.query_key_value"
    return NameMap(
        names={
            "embedding": "transformer.word_embeddings",
            "embedding_norm": "transformer.word_embeddings_layernorm",
            "layers.{i}.attention_norm": f"{LAYER}.input_layernorm",
            **fused("layers.{i}.attention", qkv, attention.widths, attention.num_heads),
            "layers.{i}.attention.output": f"{LAYER}.self_attention.dense",
            "layers.{i}.mlp_norm": f"{LAYER}.post_attention_layernorm",
            "layers.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
            "layers.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        prefix="transformer.",
    )
