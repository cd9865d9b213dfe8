"""T5, mT5 and UMT5, and models fine-tuned from them (Flan-T5, mT0). Positions are a relative bias of scores, shared by
the layers of encoder or decoder, or (UMT5) one per layer. Scores are not scaled, and all heads together may be narrower
or wider than the hidden size."""

from __future__ import annotations

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.models.config import Config
from penstock_server.models.spec import EncoderSpec, HeadSpec, LayerSpec, ModelSpec, NameMap

# For a source, and for an answer. A relative bias has no limit, and `n_positions` is 512, the training length of the
# first T5. This is four times the longest training length of any T5 (2,048, Flan-UL2). Quality beyond that is unknown,
# and the cost of a source grows with the square of its length.
MAX_TOKENS = 8192


def t5(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(feed_forward_proj="relu")
    # COMPAT: T5 1.1 is not tied, and so not scaled. transformers 5 writes tie_word_embeddings true for every T5, and
    # scale_decoder_outputs for what it was before.
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    multiplier = config.require("d_model", int) ** -0.5 if is_scaled else 1.0
    return _model("t5", config, HeadSpec(tied=True, may_be_own=not is_scaled, multiplier=multiplier))


def mt5(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: tie_word_embeddings of published configurations does not match their checkpoints, so the tensors decide.
    config = config.with_defaults(feed_forward_proj="gated-gelu")
    return _model("mt5", config, HeadSpec(tied=True, may_be_own=True))


def umt5(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: published configurations correctly say that it is not tied; transformers 5 treats it as tied and scales.
    config = config.with_defaults(feed_forward_proj="gated-gelu")
    is_scaled = config.get("tie_word_embeddings", True)
    multiplier = config.require("d_model", int) ** -0.5 if is_scaled else 1.0
    return _model("umt5", config, HeadSpec(tied=True, may_be_own=True, multiplier=multiplier), own_biases=True)


def _model(architecture: str, config: Config, head: HeadSpec, *, own_biases: bool = False) -> tuple[ModelSpec, NameMap]:
    num_heads, _ = config.heads("num_heads", "d_model")
    num_layers = config.require("num_layers", int)
    norm = NormSpec("rms", config.get("layer_norm_epsilon", 1e-6))
    mlp = _mlp(config)

    def attention(mask: AttentionMask, bias: RelativeBiasSpec | None) -> AttentionSpec:
        head_dim = config.get("d_kv", 64)
        return AttentionSpec(num_heads, num_heads, head_dim, scale=1.0, mask=mask, relative_bias=bias)

    source, answer = AttentionMask(part="source"), AttentionMask(part="answer")

    def place(side: str, index: int) -> str:
        return f"{side}layers.{index}." if own_biases else side

    def encoder_layer(index: int) -> LayerSpec:
        return LayerSpec(attention(source, _bias(config, place("encoder.", index), is_bidirectional=True)), mlp, norm)

    def decoder_layer(index: int) -> LayerSpec:
        bias = _bias(config, place("", index), is_bidirectional=False)
        return LayerSpec(attention(answer, bias), mlp, norm, cross=attention(source, None))

    embedding = EmbeddingSpec(config.require("vocab_size", int), is_wide=True)
    spec = ModelSpec(
        architecture=architecture,
        hidden_size=config.require("d_model", int),
        max_position_tokens=2 * MAX_TOKENS,
        embedding=embedding,
        layers=tuple(decoder_layer(index) for index in range(config.get("num_decoder_layers", num_layers))),
        final_norm=norm,
        head=head,
        encoder=EncoderSpec(
            embedding,
            tuple(encoder_layer(index) for index in range(num_layers)),
            norm,
            MAX_TOKENS,
            config.decoder_prefix(default_start=config.get("pad_token_id", 0)),
        ),
    )
    return spec, _names(mlp.gated)


def _mlp(config: Config) -> MlpSpec:
    kind = config.require("feed_forward_proj", str)
    *gated, name = kind.split("-")
    if gated not in ([], ["gated"]):
        raise config.refuse(f'feed_forward_proj must be "gated-ACTIVATION" or "ACTIVATION", not {kind!r}')
    name = "gelu_new" if kind == "gated-gelu" else name
    config = Config({**config.values, "feed_forward_proj": name}, config.path)
    return MlpSpec(config.require("d_ff", int), config.activation("feed_forward_proj"), gated=bool(gated), is_wide=True)


def _bias(config: Config, prefix: str, *, is_bidirectional: bool) -> RelativeBiasSpec:
    num_buckets = config.get("relative_attention_num_buckets", 32)
    max_distance = config.get("relative_attention_max_distance", 128)
    num_near = num_buckets // (4 if is_bidirectional else 2)
    if not 1 <= num_near < max_distance:
        raise config.refuse(
            f"relative_attention_num_buckets is {num_buckets} and relative_attention_max_distance {max_distance}; "
            "there must be at least 4 buckets, and fewer for near positions than the distance"
        )
    return RelativeBiasSpec(f"{prefix}relative_bias", num_buckets, max_distance, is_bidirectional)


def _names(gated: bool) -> NameMap:
    encoder, decoder = "encoder.block.{i}.layer", "decoder.block.{i}.layer"
    own_bias = "0.SelfAttention.relative_attention_bias"
    return NameMap(
        names={
            "embedding": "shared",
            "encoder.relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            "encoder.layers.{i}.relative_bias": f"{encoder}.{own_bias}",
            **_part("encoder.layers.{i}.attention", f"{encoder}.0", "SelfAttention"),
            **_mlp_part("encoder.layers.{i}", f"{encoder}.1", gated),
            "encoder.norm": "encoder.final_layer_norm",
            "relative_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            "layers.{i}.relative_bias": f"{decoder}.{own_bias}",
            **_part("layers.{i}.attention", f"{decoder}.0", "SelfAttention"),
            **_part("layers.{i}.cross", f"{decoder}.1", "EncDecAttention"),
            **_mlp_part("layers.{i}", f"{decoder}.2", gated),
            "norm": "decoder.final_layer_norm",
            "head": "lm_head",
        },
        ignored=(
            r"(encoder|decoder)\.embed_tokens\.weight",
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
        copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    )


def _part(ours: str, theirs: str, kind: str) -> dict[str, str]:
    projections = {"q": "q", "k": "k", "v": "v", "output": "o"}
    names = {f"{ours}.{name}": f"{theirs}.{kind}.{their_name}" for name, their_name in projections.items()}
    return {f"{ours}_norm": f"{theirs}.layer_norm", **names}


def _mlp_part(ours: str, theirs: str, gated: bool) -> dict[str, str]:
    inner = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    names = {**inner, "down": "wo"}
    return {
        f"{ours}.mlp_norm": f"{theirs}.layer_norm",
        **{f"{ours}.mlp.{name}": f"{theirs}.DenseReluDense.{their_name}" for name, their_name in names.items()},
    }
