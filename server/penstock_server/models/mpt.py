"""MPT: ALiBi, no biases; fused, clipped q, k and v."""

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

LAYER = "transformer.blocks.{i}"


def mpt(config: Config) -> tuple[ModelSpec, NameMap]:
    options = config.values.get("attn_config") or {}
    if not isinstance(options, dict):
        raise config.refuse(f"attn_config must be an object, not {options!r}")
    options = Config(options, config.path)
    _check(config, options)
    num_heads, head_dim = config.heads("n_heads", "d_model")
    hidden_size = config.require("d_model", int)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=options.get("softmax_scale", head_dim**-0.5),
        clip=options.get("clip_qkv", 0.0) or None,
        alibi=Alibi(alibi_slopes(num_heads, options.get("alibi_bias_max", 8.0))),
    )
    mlp = MlpSpec(config.get("expansion_ratio", 4) * hidden_size, "gelu", gated=False)
    norm = NormSpec("layer", config.get("layer_norm_epsilon", 1e-5))
    spec = ModelSpec(
        architecture="mpt",
        hidden_size=hidden_size,
        max_position_tokens=config.require("max_seq_len", int),
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=(LayerSpec(attention, mlp, norm),) * config.require("n_layers", int),
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", True)),
    )
    return spec, _names(attention)


def _check(config: Config, options: Config) -> None:
    """Refuses options that transformers ignores: it implements MPT with ALiBi and without these."""
    if not options.get("alibi", True):
        raise config.refuse("attn_config.alibi must be true")
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        if options.get(key, False):
            raise config.refuse(f"attn_config.{key} is not supported")
    if options.get("attn_type", "multihead_attention") != "multihead_attention":
        raise config.refuse(f"attn_config.attn_type {options.values['attn_type']!r} is not supported")
    if not config.get("no_bias", True):
        raise config.refuse("no_bias must be true")


def _names(attention: AttentionSpec) -> NameMap:
    return NameMap(
        names={
            "embedding": "transformer.wte",
            "layers.{i}.attention_norm": f"{LAYER}.norm_1",
            **fused("layers.{i}.attention", f"{LAYER}.attn.Wqkv", attention.widths),
            "layers.{i}.attention.output": f"{LAYER}.attn.out_proj",
            "layers.{i}.mlp_norm": f"{LAYER}.norm_2",
            "layers.{i}.mlp.up": f"{LAYER}.ffn.up_proj",
            "layers.{i}.mlp.down": f"{LAYER}.ffn.down_proj",
            "norm": "transformer.norm_f",
            "head": "lm_head",
        },
        prefix="transformer.",
    )
