"""Llama with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE with and without a shared expert,
Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import granite, llama
from penstock_server.models.config import Config
from penstock_server.models.mamba2 import ATTENTIONS, NETS, net_names, read_net
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location, fused

MLP = "model.layers.{i}.mlp"
BLOCK = "model.layers.{i}.block_sparse_moe"
SHARED = "model.layers.{i}.shared_mlp"


def with_experts(names: dict[str, str | Location], block: str = MLP, router: str = "") -> NameMap:
    """Llama's names, and these for the parameters under `layers.{i}.mlp`. block, router: the modules of transformers
    that hold experts and router, whose parameters adapters name."""
    modules = {"modules.experts": f"{block}.experts", **({"modules.router": f"{block}.{router}"} if router else {})}
    own = {f"layers.{{i}}.mlp.{name}": source for name, source in (modules | names).items()}
    return llama.NAMES | own


def stacked(block: str) -> dict[str, str | Location]:
    """The names of experts that transformers' module of this name stores together."""
    return {
        "layers.{i}.mlp.experts.gate_up.weight": f"{block}.experts.gate_up_proj",
        "layers.{i}.mlp.experts.down.weight": f"{block}.experts.down_proj",
    }


MIXTRAL_NAMES = with_experts(
    {
        "router": f"{BLOCK}.gate",
        "experts.gate": f"{BLOCK}.experts.{{e}}.w1",
        "experts.up": f"{BLOCK}.experts.{{e}}.w3",
        "experts.down": f"{BLOCK}.experts.{{e}}.w2",
    },
    router="gate",
)
QWEN_EXPERTS: dict[str, str | Location] = {
    "router": f"{MLP}.gate",
    "experts.gate": f"{MLP}.experts.{{e}}.gate_proj",
    "experts.up": f"{MLP}.experts.{{e}}.up_proj",
    "experts.down": f"{MLP}.experts.{{e}}.down_proj",
}
QWEN_NAMES = replace(
    with_experts(
        {
            **QWEN_EXPERTS,
            "shared.gate": f"{MLP}.shared_expert.gate_proj",
            "shared.up": f"{MLP}.shared_expert.up_proj",
            "shared.down": f"{MLP}.shared_expert.down_proj",
            "shared_gate": f"{MLP}.shared_expert_gate",
        }
    ),
    others=stacked(MLP),
)
QWEN3_VL_NAMES = with_experts(QWEN_EXPERTS) | stacked(MLP)
GRANITE_NAMES = with_experts(
    {
        "router": f"{BLOCK}.router.layer",
        "experts.gate_up": f"{BLOCK}.input_linear",
        "experts.down": f"{BLOCK}.output_linear",
    },
    BLOCK,
    router="router",
)


def num_experts(config: Config, default: int) -> int:
    """In the spelling of transformers 5, or of earlier versions."""
    return config.get("num_local_experts", config.get("num_experts", default))


def mixtral(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)
    routing = RoutingSpec(num_experts(config, 8), config.get("num_experts_per_tok", 2), norm_power=1.0)
    layer = llama.llama_layer(config, mask=AttentionMask(window=config.window()))
    layer = replace(layer, mlp=_experts(config, routing, "intermediate_size"))
    return llama.llama_model(config, "mixtral", (layer,) * llama.num_layers(config)), MIXTRAL_NAMES


def qwen2_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    config = config.with_defaults(num_experts_per_tok=4)
    layers = llama.windowed(config, llama.llama_layer(config, qkv_bias=config.get("qkv_bias", True)))
    return llama.llama_model(config, "qwen2_moe", with_shared_expert(config, layers, 60)), QWEN_NAMES


def with_shared_expert(config: Config, layers: tuple[LayerSpec, ...], default: int) -> tuple[LayerSpec, ...]:
    """Layers with the experts of Qwen2-MoE. default: their number if the configuration does not say it."""
    top_k = config.require("num_experts_per_tok", int)
    routing = _qwen_routing(config, RoutingSpec(num_experts(config, default), top_k))
    mlp = replace(
        _experts(config, routing, "moe_intermediate_size"),
        shared_intermediate_size=config.require("shared_expert_intermediate_size", int),
        shared_is_gated=True,
    )
    return _sparse(config, layers, mlp)


def qwen3_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=4, moe_intermediate_size=768)
    routing = _qwen_routing(config, RoutingSpec(num_experts(config, 128), config.get("num_experts_per_tok", 8)))
    bias = config.get("attention_bias", False)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(llama.rms_norm(config)))
    if config.get("use_sliding_window", False):
        layer = llama.with_window(layer, config.window())
    layers = _sparse(config, (layer,) * llama.num_layers(config), _experts(config, routing, "moe_intermediate_size"))
    return llama.llama_model(config, "qwen3_moe", layers), QWEN_NAMES


def qwen3_vl_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    """The text model of Qwen3-VL."""
    spec, _ = qwen3_moe(Config({**config.values, "norm_topk_prob": True}, config.path))
    return spec.with_expert_storage("transposed"), QWEN3_VL_NAMES


def olmoe(config: Config) -> tuple[ModelSpec, NameMap]:
    routing = _qwen_routing(config, RoutingSpec(num_experts(config, 64), config.get("num_experts_per_tok", 8)))
    bias, norm = config.get("attention_bias", False), NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm, over="projection"))
    if config.get("clip_qkv", 0.0):
        # OLMoE clips after the norms of queries and keys, other architectures before them.
        raise config.refuse("clip_qkv is not supported for olmoe; it must be null")
    layer = replace(layer, mlp=_experts(config, routing, "intermediate_size"), norm=norm)
    return llama.llama_model(config, "olmoe", (layer,) * llama.num_layers(config)), QWEN_NAMES


def granitemoe(config: Config) -> tuple[ModelSpec, NameMap]:
    return _granite(config, "granitemoe"), GRANITE_NAMES


def granitemoeshared(config: Config) -> tuple[ModelSpec, NameMap]:
    shared_size = config.get("shared_intermediate_size", 0)
    names = GRANITE_NAMES | _granite_mlp("layers.{i}.mlp.shared", shared_size)
    return _granite(config, "granitemoeshared", shared_size), names


def granitemoehybrid(config: Config) -> tuple[ModelSpec, NameMap]:
    """Granite 4: Mamba 2 in place of attention in most layers, with experts or with a plain MLP."""
    shared_size, num = config.get("shared_intermediate_size", 1024), llama.num_layers(config)
    net, has_experts = read_net(config), num_experts(config, 8) > 0
    if has_experts:
        spec = _granite(config, "granitemoehybrid", shared_size)
    else:
        spec, _ = granite.granite(config.part({**config.values, "intermediate_size": shared_size}))
    attention = spec.layers[0].plain_attention
    if config.values.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    types = config.layer_types([NETS[0]] * num, (*NETS, *ATTENTIONS))
    layers = tuple(replace(spec.layers[0], attention=net if kind in NETS else attention) for kind in types)
    names = GRANITE_NAMES | net_names(net, "model.layers.{i}.mamba")
    names |= _granite_mlp("layers.{i}.mlp.shared" if has_experts else "layers.{i}.mlp", shared_size)
    return replace(spec, architecture="granitemoehybrid", layers=layers), names


def _granite_mlp(prefix: str, size: int) -> dict[str, str | Location]:
    """The names of the shared expert."""
    own = fused(prefix, f"{SHARED}.input_linear", dict.fromkeys(("gate", "up"), size)) if size else {}
    return {**own, f"{prefix}.down": f"{SHARED}.output_linear"}


def _granite(config: Config, architecture: str, shared_size: int = 0) -> ModelSpec:
    routing = RoutingSpec(num_experts(config, 8), config.get("num_experts_per_tok", 2), scoring="softmax-chosen")
    bias = config.get("attention_bias", False)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias)
    experts = _experts(config, routing, "intermediate_size")
    layer = replace(
        layer,
        attention=replace(layer.plain_attention, scale=config.get("attention_multiplier", 1.0)),
        mlp=replace(experts, storage="stacked", shared_intermediate_size=shared_size),
        multipliers=granite.multipliers(config),
    )
    spec = llama.llama_model(config, architecture, (layer,) * llama.num_layers(config))
    embedding = replace(spec.embedding, multiplier=config.get("embedding_multiplier", 1.0))
    head = replace(spec.head, multiplier=1.0 / config.get("logits_scaling", 1.0))
    return replace(spec, embedding=embedding, head=head)


def phimoe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, rope_theta=1e6)
    routing = RoutingSpec(
        num_experts(config, 16),
        config.get("num_experts_per_tok", 2),
        scoring="sparsemixer",
        jitter=config.get("router_jitter_noise", 0.01),
    )
    bias, norm = config.get("attention_bias", False), NormSpec("layer", config.get("rms_norm_eps", 1e-5), bias=True)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias, mask=AttentionMask(window=config.window()))
    layer = replace(layer, mlp=_experts(config, routing, "intermediate_size"), norm=norm)
    spec = llama.llama_model(config, "phimoe", (layer,) * llama.num_layers(config))
    head = HeadSpec(spec.head.tied, bias=config.get("lm_head_bias", False))
    return replace(spec, head=head), MIXTRAL_NAMES | {"layers.{i}.mlp.modules.router": f"{MLP}.router"}


def _experts(config: Config, routing: RoutingSpec, width: str) -> MoeSpec:
    return MoeSpec(routing, config.require(width, int), config.activation())


def _qwen_routing(config: Config, routing: RoutingSpec) -> RoutingSpec:
    return replace(routing, norm_power=1.0 if config.get("norm_topk_prob", False) else None)


def _sparse(config: Config, layers: tuple[LayerSpec, ...], mlp: MoeSpec) -> tuple[LayerSpec, ...]:
    """Every `decoder_sparse_step`-th layer has experts, except for `mlp_only_layers`."""
    dense, step = config.values.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    return tuple(
        layer if index in dense or (index + 1) % step else replace(layer, mlp=mlp) for index, layer in enumerate(layers)
    )
