"""GPT-J and CodeGen: attention and MLP in parallel after one norm; interleaved rope in a part of each head."""

from __future__ import annotations

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.rope import RopeSpec
from penstock_server.models.config import Config
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "transformer.h.{i}"
# CodeGen was trained on 4 devices; q, v and k are fused per device, not over all heads.
CODEGEN_BLOCKS = 4
NAMES = NameMap(
    names={
        "embedding": "transformer.wte",
        "layers.{i}.attention_norm": f"{LAYER}.ln_1",
        "layers.{i}.attention.q": f"{LAYER}.attn.q_proj",
        "layers.{i}.attention.k": f"{LAYER}.attn.k_proj",
        "layers.{i}.attention.v": f"{LAYER}.attn.v_proj",
        "layers.{i}.attention.output": f"{LAYER}.attn.out_proj",
        "layers.{i}.mlp.up": f"{LAYER}.mlp.fc_in",
        "layers.{i}.mlp.down": f"{LAYER}.mlp.fc_out",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    # Masks and tables that old exporters saved.
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|causal_mask|embed_positions)",),
    prefix="transformer.",
)


def gptj(config: Config) -> tuple[ModelSpec, NameMap]:
    return _model(config, "gptj", _attention(config)), NAMES


def codegen(config: Config) -> tuple[ModelSpec, NameMap]:
    attention = _attention(config)
    if attention.num_heads % CODEGEN_BLOCKS:
        raise config.refuse(f"n_head must be a multiple of {CODEGEN_BLOCKS}, not {attention.num_heads}")
    widths = {name: attention.widths[name] for name in ("q", "v", "k")}
    qkv = fused("layers.{i}.attention", f"{LAYER}.attn.qkv_proj", widths, CODEGEN_BLOCKS)
    return _model(config, "codegen", attention), NAMES | qkv


def _attention(config: Config) -> AttentionSpec:
    num_heads, head_dim = config.heads("n_head", "n_embd")
    rope = RopeSpec("default", 10000.0, config.get("rotary_dim", 64), interleaved=True)
    return AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, rope)


def _model(config: Config, architecture: str, attention: AttentionSpec) -> ModelSpec:
    hidden_size = config.require("n_embd", int)
    activation = config.activation("activation_function", "gelu_new")
    mlp = MlpSpec(config.get("n_inner", 4 * hidden_size), activation, gated=False, bias=True, down_bias=True)
    norm = NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(attention, mlp, norm, parallel=True, shares_norm=True)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        max_position_tokens=config.require("n_positions", int),
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=(layer,) * config.require("n_layer", int),
        final_norm=norm,
        head=HeadSpec(config.get("tie_word_embeddings", False), bias=True),
    )
