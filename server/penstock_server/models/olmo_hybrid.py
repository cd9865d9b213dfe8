"""OLMo Hybrid: gated delta networks between norms before, and in every fourth layer attention with norms after."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.gated_delta import GatedDeltaSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.context import rope_parameters
from penstock_server.models.olmo import POST_NAMES
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement
from penstock_server.weights.location import Location, fused

KINDS = ("linear_attention", "full_attention")
NET = "layers.{i}.attention.net"
MODULE = "model.layers.{i}.linear_attn"
NET_NORM_EPS = 1e-5  # transformers has no setting for it


def olmo_hybrid(config: Config) -> tuple[ModelSpec, NameMap]:
    net, norm = _net(config), NormSpec("rms", config.get("rms_norm_eps", 1e-6), wide=True)
    mlp = llama.llama_mlp(config)
    kinds = {
        "linear_attention": LayerSpec(net, mlp, norm),
        "full_attention": replace(_attention(config, norm), mlp=mlp, placement=NormPlacement.POST),
    }
    num = llama.num_layers(config)
    default = [KINDS[index % 4 == 3] for index in range(num)]
    if num and "full_attention" not in default:
        default[-1] = "full_attention"
    layers = tuple(kinds[kind] for kind in config.layer_types(default, KINDS))
    return llama.llama_model(config, "olmo_hybrid", layers), _names(net)


def _attention(config: Config, norm: NormSpec) -> LayerSpec:
    """With rope unless its theta is null."""
    bias = config.get("attention_bias", False)
    layer = llama.llama_layer(config, qkv_bias=bias, output_bias=bias, qk_norm=QkNormSpec(norm, over="projection"))
    theta = {"rope_theta": 10000.0, **config.values, **rope_parameters(config).values}["rope_theta"]
    return replace(
        layer, norm=norm, attention=replace(layer.plain_attention, rope=None) if theta is None else layer.attention
    )


def _net(config: Config) -> GatedDeltaSpec:
    if config.activation() != "silu":
        raise config.refuse(f"hidden_act must be silu, not {config.activation()!r}")
    num_heads = config.require("num_attention_heads", int)
    num_key_heads = config.get("linear_num_key_heads", num_heads)
    key_dim = config.get("linear_key_head_dim", 3 * config.require("hidden_size", int) // (4 * max(1, num_key_heads)))
    return GatedDeltaSpec(
        num_heads=config.get("linear_num_value_heads", num_heads),
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=config.get("linear_value_head_dim", 2 * key_dim),
        conv_width=config.get("linear_conv_kernel_dim", 4),
        norm_eps=NET_NORM_EPS,
        strength=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )


def _names(net: GatedDeltaSpec) -> NameMap:
    """As published, and as transformers names its modules."""
    own = {"a_log": "A_log", "dt_bias": "dt_bias", "norm": "o_norm", "output": "o_proj", "z": "g_proj"}
    own |= {name: f"{name}_proj" for name in "qkvba"} | {f"conv.{name}": f"{name}_conv1d" for name in "qkv"}
    norms: dict[str, str | Location] = {
        "layers.{i}.attention_norm": "model.layers.{i}.attention_layer_norm",
        "layers.{i}.mlp_norm": "model.layers.{i}.feedforward_layer_norm",
    }
    others: dict[str, str | Location] = {
        "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        # COMPAT: transformers gives it the published name of the other layers' norm as it saves a model.
        "layers.{i}.attention_post_norm": "model.layers.{i}.feedforward_layer_norm",
    }
    mixed = {name: net.widths[name] for name in "qkv"}
    names = POST_NAMES | norms | {f"{NET}.{name}": f"{MODULE}.{theirs}" for name, theirs in own.items()}
    return replace(names, others={**others, **fused(f"{NET}.conv", f"{MODULE}.conv1d", mixed)})
