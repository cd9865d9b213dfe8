"""BART, mBART, Pegasus and M2M100 (NLLB). BART and mBART have learned positions, from row 2 of their tables, followed
by a norm; Pegasus and M2M100 have sinusoids. BART's norms are on the sums; the others' are before each part, with a
final norm after the encoder and the decoder."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models.config import Config
from penstock_server.models.spec import EncoderSpec, HeadSpec, LayerSpec, ModelSpec, NameMap, NormPlacement

LEARNED_OFFSET = 2
POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weights?"


@dataclass(frozen=True, slots=True)
class Positions:
    """offset: the row of position 0. sinusoid_steps: as in `EmbeddingSpec`; None: positions are learned, and a norm
    follows them."""

    offset: int = LEARNED_OFFSET
    sinusoid_steps: float | None = None


def bart(config: Config) -> tuple[ModelSpec, NameMap]:
    return _model("bart", config, NormPlacement.SUM, Positions(), default_start=2)


def mbart(config: Config) -> tuple[ModelSpec, NameMap]:
    return _model("mbart", config, NormPlacement.PRE, Positions(), default_start=config.get("bos_token_id", 0))


def pegasus(config: Config) -> tuple[ModelSpec, NameMap]:
    positions = Positions(0, config.require("d_model", int) / 2)
    return _model("pegasus", config, NormPlacement.PRE, positions, default_start=0)


def m2m_100(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(activation_function="relu", scale_embedding=True)
    # As in fairseq: position 0 follows the padding's row, and the lowest frequency is exactly 1/10000.
    positions = Positions(config.get("pad_token_id", 1) + 1, config.require("d_model", int) / 2 - 1)
    return _model("m2m_100", config, NormPlacement.PRE, positions, default_start=2)


def _model(
    architecture: str, config: Config, placement: NormPlacement, positions: Positions, default_start: int
) -> tuple[ModelSpec, NameMap]:
    _check(config)
    is_learned = positions.sinusoid_steps is None
    hidden_size, max_tokens = config.require("d_model", int), config.get("max_position_embeddings", 1024)
    num_heads, head_dim = config.heads("decoder_attention_heads", "d_model")
    norm = NormSpec("layer", 1e-5, bias=True)
    activation = config.activation("activation_function", "gelu")

    def attention(part: AttentionMask) -> AttentionSpec:
        scale = head_dim**-0.5
        return AttentionSpec(num_heads, num_heads, head_dim, scale, qkv_bias=True, output_bias=True, mask=part)

    def layer(side: str, mask: AttentionMask, cross: AttentionSpec | None) -> LayerSpec:
        size = config.require(f"{side}_ffn_dim", int)
        mlp = MlpSpec(size, activation, gated=False, bias=True, down_bias=True)
        return LayerSpec(attention(mask), mlp, norm, placement, cross=cross)

    def embedding(prefix: str) -> EmbeddingSpec:
        return EmbeddingSpec(
            config.require("vocab_size", int),
            multiplier=hidden_size**0.5 if config.get("scale_embedding", False) else 1.0,
            num_positions=max_tokens + positions.offset,
            position_offset=positions.offset,
            sinusoid_steps=positions.sinusoid_steps,
            norm=norm if is_learned else None,
            prefix=prefix,
        )

    source = AttentionMask(part="source")
    final_norm = norm if placement is NormPlacement.PRE else None
    spec = ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        max_position_tokens=2 * max_tokens,
        embedding=embedding(""),
        layers=(layer("decoder", AttentionMask(part="answer"), attention(source)),)
        * config.require("decoder_layers", int),
        final_norm=final_norm,
        head=HeadSpec(tied=True, logits_bias=True),
        encoder=EncoderSpec(
            embedding("encoder."),
            (layer("encoder", source, None),) * config.require("encoder_layers", int),
            final_norm,
            max_tokens,
            config.decoder_prefix(default_start),
        ),
    )
    return spec, _names(placement, is_learned)


def _check(config: Config) -> None:
    encoder_heads, decoder_heads = (config.require(f"{side}_attention_heads", int) for side in ("encoder", "decoder"))
    if encoder_heads != decoder_heads:
        raise config.refuse(
            f"encoder_attention_heads is {encoder_heads}, decoder_attention_heads {decoder_heads}; they must be equal"
        )
    if not config.get("tie_word_embeddings", True):
        raise config.refuse("tie_word_embeddings must be true")


def _names(placement: NormPlacement, is_learned: bool) -> NameMap:
    kind = "sum_norm" if placement is NormPlacement.SUM else "norm"
    return NameMap(
        names={
            "embedding": "model.shared",
            **_side("encoder", "encoder.", kind),
            **_side("decoder", "", kind),
            **_attention("layers.{i}.cross", "model.decoder.layers.{i}.encoder_attn", kind),
            "head": "lm_head",
            "head.logits_bias": "final_logits_bias",
        },
        ignored=(
            r"model\.(encoder|decoder)\.(embed_tokens\.weight|version)",
            *([] if is_learned else [POSITIONS]),
        ),
        prefix="model.",
        copies=tuple(f"model.{side}.embed_tokens.weight" for side in ("decoder", "encoder")),
    )


def _side(side: str, prefix: str, kind: str) -> dict[str, str]:
    """Names of the encoder or the decoder. prefix: of our names."""
    layer = f"model.{side}.layers.{{i}}"
    return {
        f"{prefix}positions": f"model.{side}.embed_positions",
        f"{prefix}embedding_norm": f"model.{side}.layernorm_embedding",
        **_attention(f"{prefix}layers.{{i}}.attention", f"{layer}.self_attn", kind),
        f"{prefix}layers.{{i}}.mlp.up": f"{layer}.fc1",
        f"{prefix}layers.{{i}}.mlp.down": f"{layer}.fc2",
        f"{prefix}layers.{{i}}.mlp_{kind}": f"{layer}.final_layer_norm",
        f"{prefix}norm": f"model.{side}.layer_norm",
    }


def _attention(ours: str, theirs: str, kind: str) -> dict[str, str]:
    return {
        f"{ours}_{kind}": f"{theirs}_layer_norm",
        **{f"{ours}.{name}": f"{theirs}.{name}_proj" for name in ("q", "k", "v")},
        f"{ours}.output": f"{theirs}.out_proj",
    }
