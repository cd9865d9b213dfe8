"""NomicBERT: BERT with rope instead of learned positions, and gated MLPs."""

from __future__ import annotations

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.context import rope_kind, rope_parameters
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import ClassifierSpec, HeadSpec, LayerSpec, ModelSpec, NameMap, NormPlacement
from penstock_server.weights.location import fused

# The keys of published checkpoints, and those of transformers.
_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# What published checkpoints can choose, and the only choice that transformers has.
_CHOICES = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "use_rms_norm": False,
}


def nomic_bert(config: Config) -> tuple[ModelSpec, NameMap]:
    for key, choice in _CHOICES.items():
        given = config.values.get(key)
        if given is not None and given != choice:
            raise config.refuse(f"{key} {given!r} is not supported; supported: {choice!r}")
    published = {ours: config.values[theirs] for theirs, ours in _KEYS.items() if theirs in config.values}
    config = config.with_defaults(**published)
    hidden_size, size = config.require("hidden_size", int), config.require("intermediate_size", int)
    num_heads, head_dim = config.heads()
    config = config.with_defaults(max_position_embeddings=2048)
    longest = config.default_position_tokens
    if rope_kind(rope_parameters(config).values) == "default":
        # Published checkpoints change the rope of sequences that are longer than those of their training.
        longest = min(longest, config.get("max_trained_positions", longest))
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-12), bias=True)
    attention = AttentionSpec(
        num_heads,
        num_heads,
        head_dim,
        head_dim**-0.5,
        rope=read_rope(config, head_dim, default_theta=1000.0),
        mask=AttentionMask(part="source"),
    )
    mlp = MlpSpec(size, config.activation("hidden_act", "silu"), gated=True)
    spec = ModelSpec(
        architecture="nomic_bert",
        hidden_size=hidden_size,
        max_position_tokens=longest,
        embedding=EmbeddingSpec(
            config.require("vocab_size", int), num_types=config.get("type_vocab_size", 2), norm=norm
        ),
        layers=(LayerSpec(attention, mlp, norm, NormPlacement.SUM),) * config.require("num_hidden_layers", int),
        final_norm=None,
        head=HeadSpec(tied=True),
        classifier=ClassifierSpec(bias=True, dense_activation="tanh"),
    )
    return spec, _names(num_heads * head_dim)


def _names(width: int) -> NameMap:
    prefix = "nomic_bert."
    layer = f"{prefix}encoder.layers.{{i}}"
    return NameMap(
        names={
            "embedding": f"{prefix}embeddings.word_embeddings",
            "types": f"{prefix}embeddings.token_type_embeddings",
            "embedding_norm": f"{prefix}emb_ln",
            **fused("layers.{i}.attention", f"{layer}.attn.Wqkv", dict.fromkeys("qkv", width)),
            "layers.{i}.attention.output": f"{layer}.attn.out_proj",
            "layers.{i}.attention_sum_norm": f"{layer}.norm1",
            "layers.{i}.mlp.gate": f"{layer}.mlp.fc12",
            "layers.{i}.mlp.up": f"{layer}.mlp.fc11",
            "layers.{i}.mlp.down": f"{layer}.mlp.fc2",
            "layers.{i}.mlp_sum_norm": f"{layer}.norm2",
            "classifier.dense": f"{prefix}pooler.dense",
            "classifier.out": "classifier",
        },
        # Heads of the training. A reranker's head is a parameter, so it is never ignored.
        ignored=(r"nomic_bert\.pooler\.dense\.(weight|bias)", r"cls\..*"),
        prefix=prefix,
    )
