"""DBRX: LayerNorms without biases; fused, clipped queries, keys and values; experts concatenated to one matrix."""

from __future__ import annotations

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "transformer.blocks.{i}"
ATTENTION = f"{LAYER}.norm_attn_norm"


def dbrx(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.part({**config.values, "max_position_embeddings": config.require("max_seq_len", int)})
    attention, norm = _attention(config, _section(config, "attn_config")), NormSpec("layer", 1e-5)
    layer = LayerSpec(attention, _experts(_section(config, "ffn_config")), norm)
    spec = ModelSpec(
        architecture="dbrx",
        hidden_size=config.require("d_model", int),
        max_position_tokens=config.max_position_tokens,
        default_position_tokens=config.default_position_tokens,
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=(layer,) * config.require("n_layers", int),
        final_norm=norm,
        head=HeadSpec(tied=config.get("tie_word_embeddings", False)),
    )
    return spec, _names(attention)


def _section(config: Config, key: str) -> Config:
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.refuse(f"{key} must be an object, not {values!r}")
    return Config(values, config.path)


def _attention(config: Config, options: Config) -> AttentionSpec:
    num_heads, head_dim = config.heads("n_heads", "d_model")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=options.get("kv_n_heads", 1),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        # COMPAT: published checkpoints have theta here, where transformers 5 ignores it; it writes rope_parameters.
        rope=read_rope(config, head_dim, default_theta=options.get("rope_theta", 10000.0)),
        clip=options.get("clip_qkv", 0.0) or None,
    )


def _experts(options: Config) -> MoeSpec:
    norm_power: float | None = options.get("moe_normalize_expert_weights", 1.0)
    if "moe_normalize_expert_weights" in options.values and options.values["moe_normalize_expert_weights"] is None:
        norm_power = None  # null is not the default here: it means that weights are not normalized
    routing = RoutingSpec(options.get("moe_num_experts", 4), options.get("moe_top_k", 1), norm_power=norm_power)
    activation = Config(options.values.get("ffn_act_fn") or {}, options.path).activation("name")
    return MoeSpec(routing, options.get("ffn_hidden_size", 3584), activation, storage="rows")


def _names(attention: AttentionSpec) -> NameMap:
    return NameMap(
        names={
            "embedding": "transformer.wte",
            "layers.{i}.attention_norm": f"{ATTENTION}.norm_1",
            **fused("layers.{i}.attention", f"{ATTENTION}.attn.Wqkv", attention.widths),
            "layers.{i}.attention.output": f"{ATTENTION}.attn.out_proj",
            "layers.{i}.mlp_norm": f"{ATTENTION}.norm_2",
            "layers.{i}.mlp.router": f"{LAYER}.ffn.router.layer",
            "layers.{i}.mlp.experts.gate.weight": f"{LAYER}.ffn.experts.mlp.w1",
            "layers.{i}.mlp.experts.up.weight": f"{LAYER}.ffn.experts.mlp.v1",
            "layers.{i}.mlp.experts.down.weight": f"{LAYER}.ffn.experts.mlp.w2",
            "norm": "transformer.norm_f",
            "head": "lm_head",
        },
        prefix="transformer.",
    )
