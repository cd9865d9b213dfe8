"""Jamba: Mamba in place of attention in most layers, experts in some, and no rope."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.mamba import net_names, read_net
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

LAYER = "model.layers.{i}"
MLP = f"{LAYER}.feed_forward"


def jamba(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8)
    norm = llama.rms_norm(config)
    net = replace(read_net(config), norm_eps=norm.eps)
    attention = replace(llama.llama_attention(config), rope=None)
    mlp, num_experts = llama.llama_mlp(config), moe.num_experts(config, 16)
    sparse: MoeSpec | None = None
    if num_experts > 1:
        routing = RoutingSpec(num_experts, config.get("num_experts_per_tok", 2))
        sparse = MoeSpec(routing, mlp.intermediate_size, config.activation())
    attends, expert_layers = _repeats(config, "attn_layer", (8, 4)), _repeats(config, "expert_layer", (2, 1))
    layers = tuple(
        LayerSpec(attention if index in attends else net, sparse if sparse and index in expert_layers else mlp, norm)
        for index in range(llama.num_layers(config))
    )
    return llama.llama_model(config, "jamba", layers), NAMES | net_names(net, f"{LAYER}.mamba")


def _repeats(config: Config, name: str, default: tuple[int, int]) -> range:
    """The layers that a period and an offset describe."""
    period, offset = config.get(f"{name}_period", default[0]), config.get(f"{name}_offset", default[1])
    if not 0 <= offset < period:
        raise config.refuse(f"{name}_offset must be from 0 to below {name}_period {period}, not {offset}")
    return range(offset, llama.num_layers(config), period)


NAMES = replace(
    moe.with_experts(
        {
            **{name: f"{MLP}.{name}_proj" for name in ("gate", "up", "down")},
            "router": f"{MLP}.router",
            **{f"experts.{name}": f"{MLP}.experts.{{e}}.{name}_proj" for name in ("gate", "up", "down")},
        },
        MLP,
        router="router",
    )
    | {"layers.{i}.mlp_norm": f"{LAYER}.pre_ff_layernorm", "norm": "model.final_layernorm"},
    others=moe.stacked(MLP),
)
