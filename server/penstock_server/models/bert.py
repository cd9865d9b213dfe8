"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions and norms on the sums."""

from __future__ import annotations

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.spec import ClassifierSpec, HeadSpec, LayerSpec, ModelSpec, NameMap, NormPlacement


def bert(config: Config) -> tuple[ModelSpec, NameMap]:
    names = {"classifier.dense": "bert.pooler.dense", "classifier.out": "classifier"}
    return _model("bert", config, position_offset=0), _names("bert.", names)


def roberta(config: Config) -> tuple[ModelSpec, NameMap]:
    # As in fairseq: position 0 follows the padding's row.
    names = {"classifier.dense": "classifier.dense", "classifier.out": "classifier.out_proj"}
    offset = config.get("pad_token_id", 1) + 1
    return _model("roberta", config, position_offset=offset), _names("roberta.", names)


def _model(architecture: str, config: Config, position_offset: int) -> ModelSpec:
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.refuse(f"position_embedding_type {kind!r} is not supported; supported: absolute")
    num_heads, head_dim = config.heads()
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-12), bias=True)
    attention = AttentionSpec(
        num_heads,
        num_heads,
        head_dim,
        head_dim**-0.5,
        qkv_bias=True,
        output_bias=True,
        mask=AttentionMask(part="source"),
    )
    activation = config.activation("hidden_act", "gelu")
    mlp = MlpSpec(config.require("intermediate_size", int), activation, gated=False, bias=True, down_bias=True)
    num_positions = config.get("max_position_embeddings", 512)
    return ModelSpec(
        architecture=architecture,
        hidden_size=config.require("hidden_size", int),
        max_position_tokens=num_positions - position_offset,
        embedding=EmbeddingSpec(
            config.require("vocab_size", int),
            num_positions=num_positions,
            position_offset=position_offset,
            num_types=config.get("type_vocab_size", 2),
            norm=norm,
        ),
        layers=(LayerSpec(attention, mlp, norm, NormPlacement.SUM),) * config.require("num_hidden_layers", int),
        final_norm=None,
        head=HeadSpec(tied=True),
        classifier=ClassifierSpec(bias=True, dense_activation="tanh"),
    )


def _names(prefix: str, classifier: dict[str, str]) -> NameMap:
    layer = f"{prefix}encoder.layer.{{i}}"
    return NameMap(
        names={
            "embedding": f"{prefix}embeddings.word_embeddings",
            "positions": f"{prefix}embeddings.position_embeddings",
            "types": f"{prefix}embeddings.token_type_embeddings",
            "embedding_norm": f"{prefix}embeddings.LayerNorm",
            "layers.{i}.attention.q": f"{layer}.attention.self.query",
            "layers.{i}.attention.k": f"{layer}.attention.self.key",
            "layers.{i}.attention.v": f"{layer}.attention.self.value",
            "layers.{i}.attention.output": f"{layer}.attention.output.dense",
            "layers.{i}.attention_sum_norm": f"{layer}.attention.output.LayerNorm",
            "layers.{i}.mlp.up": f"{layer}.intermediate.dense",
            "layers.{i}.mlp.down": f"{layer}.output.dense",
            "layers.{i}.mlp_sum_norm": f"{layer}.output.LayerNorm",
            **classifier,
        },
        # Heads of the training, and a table of consecutive numbers. A reranker's head is a parameter, so it is never
        # ignored.
        ignored=(
            rf"{prefix.replace('.', chr(92) + '.')}(pooler\.dense\.(weight|bias)|embeddings\.position_ids)",
            r"(cls|lm_head)\..*",
        ),
        prefix=prefix,
    )
