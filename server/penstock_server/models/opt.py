"""OPT: learned positions from row 2 of the table. The 350m model has norms on the sums, and narrower embeddings."""

from __future__ import annotations

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.context import stated_tokens
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap, NormPlacement

POSITION_OFFSET = 2
LAYER = "model.decoder.layers.{i}"


def opt(config: Config) -> tuple[ModelSpec, NameMap]:
    num_heads, head_dim = config.heads()
    hidden_size, max_tokens = config.require("hidden_size", int), stated_tokens(config)
    bias, has_weights = config.get("enable_bias", True), config.get("layer_norm_elementwise_affine", True)
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, qkv_bias=bias, output_bias=bias)
    activation = config.activation("activation_function", "relu")
    mlp = MlpSpec(config.require("ffn_dim", int), activation, gated=False, bias=bias, down_bias=bias)
    norm = NormSpec("layer", 1e-5, bias=has_weights, unweighted_dim=None if has_weights else hidden_size)
    is_before = config.get("do_layer_norm_before", True)
    has_final = is_before and not config.get("_remove_final_layer_norm", False)
    layer = LayerSpec(attention, mlp, norm, NormPlacement.PRE if is_before else NormPlacement.SUM)
    spec = ModelSpec(
        architecture="opt",
        hidden_size=hidden_size,
        max_position_tokens=max_tokens,
        embedding=EmbeddingSpec(
            config.require("vocab_size", int),
            size=config.get("word_embed_proj_dim", hidden_size),
            num_positions=max_tokens + POSITION_OFFSET,
            position_offset=POSITION_OFFSET,
        ),
        layers=(layer,) * config.require("num_hidden_layers", int),
        final_norm=norm if has_final else None,
        head=HeadSpec(config.get("tie_word_embeddings", True)),
    )
    return spec, _names(is_before)


def _names(is_before: bool) -> NameMap:
    names = ("attention_norm", "mlp_norm") if is_before else ("attention_sum_norm", "mlp_sum_norm")
    return NameMap(
        names={
            "embedding": "model.decoder.embed_tokens",
            "project_in": "model.decoder.project_in",
            "positions": "model.decoder.embed_positions",
            f"layers.{{i}}.{names[0]}": f"{LAYER}.self_attn_layer_norm",
            "layers.{i}.attention.q": f"{LAYER}.self_attn.q_proj",
            "layers.{i}.attention.k": f"{LAYER}.self_attn.k_proj",
            "layers.{i}.attention.v": f"{LAYER}.self_attn.v_proj",
            "layers.{i}.attention.output": f"{LAYER}.self_attn.out_proj",
            f"layers.{{i}}.{names[1]}": f"{LAYER}.final_layer_norm",
            "layers.{i}.mlp.up": f"{LAYER}.fc1",
            "layers.{i}.mlp.down": f"{LAYER}.fc2",
            "norm": "model.decoder.final_layer_norm",
            "project_out": "model.decoder.project_out",
            "head": "lm_head",
        },
        prefix="model.",
    )
