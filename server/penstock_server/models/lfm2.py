"""LFM2 with and without experts: short convolutions, and in some layers attention."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.layers.short_conv import INPUTS, ShortConvSpec
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

KINDS = ("conv", "full_attention")
LAYER = "model.layers.{i}"
NET = "layers.{i}.attention.net"
MLP = f"{LAYER}.feed_forward"


def lfm2(config: Config) -> tuple[ModelSpec, NameMap]:
    num = llama.num_layers(config)
    attending = config.integers("full_attn_idxs")
    default = [KINDS[attending is None or index in attending] for index in range(num)]
    mlp = MlpSpec(_mlp_width(config), "silu")
    return _model(config, "lfm2", default, (mlp,) * num)


def lfm2_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    """The first layers are dense."""
    num = llama.num_layers(config)
    routing = RoutingSpec(
        moe.num_experts(config, 32),
        config.get("num_experts_per_tok", 4),
        scoring="sigmoid",
        norm_power=1.0 if config.get("norm_topk_prob", True) else None,
        norm_epsilon=1e-6,
        scale=config.get("routed_scaling_factor", 1.0),
        has_correction=config.get("use_expert_bias", True),
    )
    dense = MlpSpec(config.get("intermediate_size", 7168), "silu")
    sparse = MoeSpec(routing, config.get("moe_intermediate_size", 1792))
    num_dense = config.get("num_dense_layers", 2)
    if not config.values.get("layer_types"):
        raise config.refuse("it lacks layer_types")
    return _model(config, "lfm2_moe", [""] * num, tuple(dense if i < num_dense else sparse for i in range(num)))


def _model(
    config: Config, architecture: str, default: list[str], mlps: tuple[MlpSpec | MoeSpec, ...]
) -> tuple[ModelSpec, NameMap]:
    """default: the kinds of layers that do not name them."""
    is_tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    config = config.part({**config.values, "tie_word_embeddings": is_tied})
    norm = NormSpec("rms", config.get("norm_eps", 1e-5))
    parts: dict[str, AttentionSpec | ShortConvSpec] = {
        "conv": ShortConvSpec(config.get("conv_L_cache", 3), config.get("conv_bias", False)),
        "full_attention": llama.llama_attention(
            config.with_defaults(num_key_value_heads=8, rope_theta=1e6), qk_norm=QkNormSpec(norm)
        ),
    }
    kinds = config.layer_types(default, KINDS)
    layers = tuple(LayerSpec(parts[kind], mlp, norm) for kind, mlp in zip(kinds, mlps, strict=True))
    spec = llama.llama_model(config, architecture, layers)
    return spec, NAMES | fused(NET, f"{LAYER}.conv.in_proj", dict.fromkeys(INPUTS, spec.hidden_size))


def _mlp_width(config: Config) -> int:
    width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    unit = config.get("block_multiple_of", 256)
    if unit < 1:
        raise config.refuse(f"block_multiple_of must be at least 1, not {unit}")
    return ceil(width / unit) * unit


NAMES = replace(
    moe.with_experts(
        {
            "gate": f"{MLP}.w1",
            "up": f"{MLP}.w3",
            "down": f"{MLP}.w2",
            "router": f"{MLP}.gate",
            "router.correction": f"{MLP}.expert_bias",
            "experts.gate": f"{MLP}.experts.{{e}}.w1",
            "experts.up": f"{MLP}.experts.{{e}}.w3",
            "experts.down": f"{MLP}.experts.{{e}}.w2",
        },
        MLP,
        router="gate",
    )
    | {
        "norm": "model.embedding_norm",
        "layers.{i}.attention_norm": f"{LAYER}.operator_norm",
        "layers.{i}.mlp_norm": f"{LAYER}.ffn_norm",
        "layers.{i}.attention.q_norm": f"{LAYER}.self_attn.q_layernorm",
        "layers.{i}.attention.k_norm": f"{LAYER}.self_attn.k_layernorm",
        "layers.{i}.attention.output": f"{LAYER}.self_attn.out_proj",
        f"{NET}.conv": f"{LAYER}.conv.conv",
        f"{NET}.output": f"{LAYER}.conv.out_proj",
    },
    others=moe.stacked(MLP),
)
