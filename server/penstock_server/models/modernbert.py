"""ModernBERT: an encoder with rope, gated MLPs and norms before each part. Most layers attend to a window around each
token, with a rope of their own."""

from __future__ import annotations

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.rope import RopeSpec
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import ClassifierSpec, HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location, Strip


def modernbert(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(max_position_embeddings=8192)
    num_layers, hidden_size = config.require("num_hidden_layers", int), config.require("hidden_size", int)
    num_heads, head_dim = config.heads()
    norm = NormSpec("layer", config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False))
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    size = config.require("intermediate_size", int)
    mlp = MlpSpec(size, config.activation("hidden_activation", "gelu"), gated=True, bias=mlp_bias, down_bias=mlp_bias)
    # Tokens on either side, its own included.
    window = config.get("local_attention", 128) // 2 + 1
    interval = config.get("global_attn_every_n_layers", 3)
    types = config.layer_types(["sliding_attention" if i % interval else "full_attention" for i in range(num_layers)])

    def layer(index: int) -> LayerSpec:
        is_local = types[index] == "sliding_attention"
        attention = AttentionSpec(
            num_heads,
            num_heads,
            head_dim,
            head_dim**-0.5,
            rope=_rope(config, head_dim, is_local=is_local),
            qkv_bias=bias,
            output_bias=bias,
            mask=AttentionMask(part="source", window=window if is_local else None),
        )
        return LayerSpec(attention, mlp, norm, has_attention_norm=index > 0)

    spec = ModelSpec(
        architecture="modernbert",
        hidden_size=hidden_size,
        max_position_tokens=config.default_position_tokens,
        embedding=EmbeddingSpec(config.require("vocab_size", int), norm=norm),
        layers=tuple(layer(index) for index in range(num_layers)),
        final_norm=norm,
        head=HeadSpec(tied=True),
        classifier=ClassifierSpec(
            bias=True,
            dense_activation=config.get("classifier_activation", "gelu"),
            dense_bias=config.get("classifier_bias", False),
            norm=norm,
        ),
    )
    return spec, _names(hidden_size, size)


def _rope(config: Config, head_dim: int, *, is_local: bool) -> RopeSpec:
    if is_local:
        kind, key, theta = "sliding_attention", "local_rope_theta", 10000.0
    else:
        kind, key, theta = "full_attention", "global_rope_theta", 160000.0
    return read_rope(config, head_dim, default_theta=theta, theta_key=key, layer_type=kind)


def _names(hidden_size: int, intermediate_size: int) -> NameMap:
    layer = "model.layers.{i}"

    def strips(name: str, parts: tuple[str, ...], width: int) -> dict[str, str | Location]:
        stride = width * len(parts)
        return {part: Location(name, strip=Strip(index * width, width, stride)) for index, part in enumerate(parts)}

    qkv = tuple(f"layers.{{i}}.attention.{part}" for part in "qkv")
    return NameMap(
        names={
            "embedding": "model.embeddings.tok_embeddings",
            "embedding_norm": "model.embeddings.norm",
            **strips(f"{layer}.attn.Wqkv", qkv, hidden_size),
            "layers.{i}.attention.output": f"{layer}.attn.Wo",
            "layers.{i}.attention_norm": f"{layer}.attn_norm",
            "layers.{i}.mlp_norm": f"{layer}.mlp_norm",
            **strips(f"{layer}.mlp.Wi", ("layers.{i}.mlp.gate", "layers.{i}.mlp.up"), intermediate_size),
            "layers.{i}.mlp.down": f"{layer}.mlp.Wo",
            "norm": "model.final_norm",
            "classifier.dense": "head.dense",
            "classifier.norm": "head.norm",
            "classifier.out": "classifier",
        },
        # The heads of the training. A reranker's head is a parameter, so it is never ignored.
        ignored=(r"(head|decoder)\..*",),
        prefix="model.",
    )
