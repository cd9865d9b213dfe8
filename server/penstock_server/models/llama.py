"""Llama, and architectures that differ from it in options only."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.layers.temperature import TemperatureSpec
from penstock_server.models.config import Config
from penstock_server.models.context import original_tokens, rope_parameters
from penstock_server.models.rope_config import read_rope
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location

LAYER_NAMES: dict[str, str | Location] = {
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
    "layers.{i}.attention.output": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj",
}
NAMES = NameMap(
    names={"embedding": "model.embed_tokens", **LAYER_NAMES, "norm": "model.norm", "head": "lm_head"},
    prefix="model.",
)


def llama(config: Config) -> tuple[ModelSpec, NameMap]:
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    layer = llama_layer(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    return llama_model(config, "llama", (layer,) * num_layers(config)), NAMES


def mistral(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: without the key the window is transformers' default; null means no window.
    config = config.with_defaults(sliding_window=4096, num_key_value_heads=8)
    layer = llama_layer(config, mask=AttentionMask(window=config.window()))
    return llama_model(config, "mistral", (layer,) * num_layers(config)), NAMES


def ministral(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(sliding_window=4096, num_key_value_heads=8)
    has_window = config.values["sliding_window"] is not None
    types = config.layer_types(["sliding_attention" if has_window else "full_attention"] * num_layers(config))
    return llama_model(config, "ministral", windowed_by_type(config, types)), NAMES


def ministral3(config: Config) -> tuple[ModelSpec, NameMap]:
    """Queries grow with the number of lengths that the model was trained for first."""
    config = config.with_defaults(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    if not (config.values.get("rope_scaling") or config.values.get("rope_parameters")):
        lengths = {"factor": 16.0, "original_max_position_embeddings": 16384}
        magnitudes = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        yarn = {"rope_type": "yarn", "rope_theta": 1e6, **lengths, **magnitudes}
        config = config.part({**config.values, "rope_parameters": yarn})
    layer, rope = llama_layer(config, mask=AttentionMask(window=config.window())), rope_parameters(config)
    if strength := rope.get("llama_4_scaling_beta", 0.0):
        temperature = TemperatureSpec(original_tokens(config, rope), strength, counts_from_one=False)
        layer = replace(layer, attention=replace(layer.plain_attention, temperature=temperature))
    return llama_model(config, "ministral3", (layer,) * num_layers(config)), NAMES


def cwm(config: Config) -> tuple[ModelSpec, NameMap]:
    llama3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if not config.values.get("rope_scaling"):
        scaling = {**llama3, "original_max_position_embeddings": 8192}
        config = config.with_defaults(rope_parameters=scaling)
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5)
    config = config.with_defaults(sliding_window=8192, rope_theta=1e6)
    types = config.layer_types(["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers(config))])
    return llama_model(config, "cwm", windowed_by_type(config, types)), NAMES


def seed_oss(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(head_dim=128, num_key_value_heads=8)
    layer = llama_layer(
        config,
        qkv_bias=config.get("attention_bias", True),
        output_bias=config.get("attention_out_bias", False),
        mlp_bias=config.get("mlp_bias", False),
    )
    return llama_model(config, "seed_oss", (layer,) * num_layers(config)), NAMES


def arcee(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(hidden_act="relu2", rms_norm_eps=1e-5)
    bias = config.get("attention_bias", False)
    attention = llama_attention(config, qkv_bias=bias, output_bias=bias)
    mlp = llama_mlp(config, gated=False, bias=config.get("mlp_bias", False))
    layer = LayerSpec(attention, mlp, rms_norm(config))
    return llama_model(config, "arcee", (layer,) * num_layers(config)), NAMES


def ernie4_5(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rope_theta=500000.0, head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5)
    bias = config.get("use_bias", False)
    attention = llama_attention(config, qkv_bias=bias, output_bias=bias, interleaved=True)
    layer = LayerSpec(attention, llama_mlp(config, bias=bias), rms_norm(config))
    return llama_model(config, "ernie4_5", (layer,) * num_layers(config), tied=True), NAMES


def smollm3(config: Config) -> tuple[ModelSpec, NameMap]:
    """Every fourth layer has no rope."""
    config = config.with_defaults(rope_theta=2e6, num_key_value_heads=4)
    num, interval = num_layers(config), config.get("no_rope_layer_interval", 4)
    has_rope = config.values.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num)]
    if not isinstance(has_rope, list) or len(has_rope) < num:
        raise config.refuse(f"no_rope_layers must be a list of {num} numbers, not {has_rope!r}")
    has_window = config.get("use_sliding_window", False)
    default = ["sliding_attention" if has_window and not each else "full_attention" for each in has_rope[:num]]
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    attention = llama_attention(config, qkv_bias=bias, output_bias=bias)
    with_rope = LayerSpec(attention, llama_mlp(config, bias=mlp_bias), rms_norm(config))
    without_rope = replace(with_rope, attention=replace(attention, rope=None))
    window = config.window() if has_window else None
    layers = tuple(
        with_window(with_rope if each else without_rope, window if kind == "sliding_attention" else None)
        for each, kind in zip(has_rope, config.layer_types(default), strict=False)
    )
    return llama_model(config, "smollm3", layers, tied=True), NAMES


def qwen2(config: Config) -> tuple[ModelSpec, NameMap]:
    return llama_model(config, "qwen2", windowed(config, llama_layer(config, qkv_bias=True))), NAMES


def qwen3(config: Config) -> tuple[ModelSpec, NameMap]:
    bias = config.get("attention_bias", False)
    norm = QkNormSpec(rms_norm(config))
    with_head_dim = Config({"head_dim": 128, **config.values}, config.path)
    layer = llama_layer(with_head_dim, qkv_bias=bias, output_bias=bias, qk_norm=norm)
    return llama_model(config, "qwen3", windowed(config, layer)), NAMES


def rms_norm(config: Config) -> NormSpec:
    return NormSpec("rms", config.get("rms_norm_eps", 1e-6))


def num_layers(config: Config) -> int:
    return config.require("num_hidden_layers", int)


def llama_layer(
    config: Config,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    mask: AttentionMask = AttentionMask(),  # noqa: B008 - frozen
    qk_norm: QkNormSpec | None = None,
) -> LayerSpec:
    attention = llama_attention(config, qkv_bias=qkv_bias, output_bias=output_bias, mask=mask, qk_norm=qk_norm)
    return LayerSpec(attention, llama_mlp(config, bias=mlp_bias), rms_norm(config))


def llama_attention(
    config: Config,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mask: AttentionMask = AttentionMask(),  # noqa: B008 - frozen
    qk_norm: QkNormSpec | None = None,
    interleaved: bool = False,
    layer_type: str | None = None,
    default_partial: float = 1.0,
) -> AttentionSpec:
    """interleaved, layer_type, default_partial: see `read_rope`."""
    num_heads, head_dim = config.heads()
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(
            config, head_dim, interleaved=interleaved, layer_type=layer_type, default_partial=default_partial
        ),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mask=mask,
        qk_norm=qk_norm,
    )


def llama_mlp(config: Config, *, gated: bool = True, bias: bool = False) -> MlpSpec:
    return MlpSpec(config.require("intermediate_size", int), config.activation(), gated, bias=bias, down_bias=bias)


def llama_model(config: Config, architecture: str, layers: tuple[LayerSpec, ...], tied: bool = False) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        hidden_size=config.require("hidden_size", int),
        max_position_tokens=config.max_position_tokens,
        default_position_tokens=config.default_position_tokens,
        embedding=EmbeddingSpec(config.require("vocab_size", int)),
        layers=layers,
        final_norm=layers[0].norm if layers else rms_norm(config),
        head=HeadSpec(config.get("tie_word_embeddings", tied)),
    )


def windowed(config: Config, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Qwen's layers: those from `max_window_layers` on have a sliding window, if the model uses windows."""
    num = num_layers(config)
    window = config.window() if config.get("use_sliding_window", False) else None
    full = min(num, config.get("max_window_layers", 28))
    types = config.layer_types(["full_attention"] * full + ["sliding_attention"] * (num - full))
    return tuple(with_window(layer, window if kind == "sliding_attention" else None) for kind in types)


def windowed_by_type(config: Config, types: list[str]) -> tuple[LayerSpec, ...]:
    """Layers without biases; those of type sliding_attention have the window."""
    layer, window = llama_layer(config), config.window()
    return tuple(with_window(layer, window if kind == "sliding_attention" else None) for kind in types)


def with_window(layer: LayerSpec, window: int | None) -> LayerSpec:
    return replace(layer, attention=replace(layer.plain_attention, mask=AttentionMask(window=window)))
