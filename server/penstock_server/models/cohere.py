"""Cohere's Command R: attention and MLP in parallel after one LayerNorm without bias, interleaved rope.

In Command R7B and Command A, three of four layers have a sliding window; the fourth has full attention without rope.
`cohere2_moe` is the same with experts, behind plain MLPs in the first layers."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models.config import Config
from penstock_server.models.deepseek import EXPERT_NAMES
from penstock_server.models.llama import NAMES, llama_attention, llama_mlp, llama_model, num_layers, rms_norm
from penstock_server.models.spec import LayerSpec, ModelSpec, Multipliers, NameMap


def cohere(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rope_theta=500000.0)
    norm = _norm(config)
    qk_norm = QkNormSpec(norm, over="heads") if config.get("use_qk_norm", False) else None
    layer = _layer(config, replace(_attention(config), qk_norm=qk_norm))
    return _model(config, "cohere", (layer,) * num_layers(config)), NAMES


def cohere2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(sliding_window=4096)
    attention = _attention(config)
    has_window = config.values["sliding_window"] is not None
    rope = attention.rope if has_window else None
    kinds = {
        "full_attention": _layer(config, replace(attention, rope=None)),
        "sliding_attention": _layer(config, replace(attention, rope=rope, mask=AttentionMask(config.window()))),
    }
    default = _types(num_layers(config), config.get("sliding_window_pattern", 4))
    return _model(config, "cohere2", tuple(kinds[kind] for kind in config.layer_types(default))), NAMES


def cohere2_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(sliding_window=4096, head_dim=128)
    num, num_dense = num_layers(config), min(num_layers(config), config.get("first_k_dense_replace", 0))
    dense_pattern = config.get("prefix_dense_sliding_window_pattern", 1)
    default = _types(num_dense, dense_pattern) + _types(num - num_dense, config.get("sliding_window_pattern", 4))
    plain = ["dense"] * num_dense + ["sparse"] * (num - num_dense)
    width = config.get("prefix_dense_intermediate_size", config.require("intermediate_size", int))
    norm = _norm(config) if config.values.get("rms_norm_eps") is None else rms_norm(config)
    sparse, factor = _experts(config)
    kinds: dict[str, MlpSpec | MoeSpec] = {"dense": MlpSpec(width, config.activation()), "sparse": sparse}
    attention, has_window = _attention(config), config.values["sliding_window"] is not None
    layers = []
    for kind, mlp in zip(
        config.layer_types(default), config.layer_types(plain, tuple(kinds), key="mlp_layer_types"), strict=True
    ):
        is_windowed = kind == "sliding_attention"
        has_rope = (is_windowed and has_window) or (mlp == "dense" and dense_pattern == 1)
        part = replace(
            attention,
            rope=attention.rope if has_rope else None,
            mask=AttentionMask(config.window() if is_windowed else None),
        )
        multipliers = Multipliers(mlp=factor if mlp == "sparse" else 1.0)
        layers.append(LayerSpec(part, kinds[mlp], norm, parallel=True, shares_norm=True, multipliers=multipliers))
    return _model(config, "cohere2_moe", tuple(layers)), EXPERT_NAMES


def _experts(config: Config) -> tuple[MoeSpec, float]:
    """The experts, and the factor of what they and the shared ones add up to."""
    num, top_k = config.get("num_experts", 8), config.get("num_experts_per_tok", 2)
    selections = {
        "softmax": RoutingSpec(num, top_k, scoring="softmax-chosen"),
        "sigmoid": RoutingSpec(
            num, top_k, scoring="sigmoid", norm_power=1.0 if config.get("norm_topk_prob", True) else None
        ),
    }
    selection, strategy = config.get("expert_selection_fn", "softmax"), "shared_expert_combination_strategy"
    factors = {"average": 0.5, "sum": 1.0}
    combination = config.get(strategy, "average")
    for key, value, known in (("expert_selection_fn", selection, selections), (strategy, combination, factors)):
        if value not in known:
            raise config.refuse(f"{key} {value!r} is not supported; supported: {', '.join(known)}")
    width, num_shared = config.require("intermediate_size", int), config.get("num_shared_experts", 0)
    experts = MoeSpec(selections[selection], width, config.activation(), shared_intermediate_size=width * num_shared)
    return experts, factors[combination] if num_shared else 1.0


def _types(num: int, pattern: int) -> list[str]:
    """The last of every `pattern` layers has full attention."""
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num)]


def _norm(config: Config) -> NormSpec:
    return NormSpec("layer", config.get("layer_norm_eps", 1e-5))


def _attention(config: Config) -> AttentionSpec:
    bias = config.get("attention_bias", False)
    return llama_attention(config, qkv_bias=bias, output_bias=bias, interleaved=True)


def _layer(config: Config, attention: AttentionSpec) -> LayerSpec:
    return LayerSpec(attention, llama_mlp(config), _norm(config), parallel=True, shares_norm=True)


def _model(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    spec = llama_model(config, architecture, layers, tied=True)
    return replace(spec, head=replace(spec.head, multiplier=config.get("logit_scale", 0.0625)))
