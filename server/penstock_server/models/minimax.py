"""MiniMax-Text-01: lightning attention, and in some layers attention. All layers have the experts of Mixtral, and norms
whose results replace the residual."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.experts import MoeSpec, RoutingSpec
from penstock_server.layers.mamba2 import Mamba2Spec
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, Multipliers, NameMap
from penstock_server.weights.location import fused

KINDS = ("linear_attention", "full_attention")
NET = "layers.{i}.attention.net"
ATTENTION = "model.layers.{i}.self_attn"
NET_NORM_EPS = 1e-6  # transformers has no setting for it
FACTORS = {"linear_attention": "linear_attn", "full_attention": "full_attn"}  # prefixes of keys


def minimax(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    num_heads, head_dim = config.heads()
    # COMPAT: the publisher's code and vLLM rotate so much of each head; transformers does not know the key.
    partial = config.get("rotary_dim", head_dim) / head_dim
    mask = AttentionMask(window=config.window())
    attention = llama.llama_attention(config, mask=mask, default_partial=partial)
    routing = RoutingSpec(moe.num_experts(config, 8), config.get("num_experts_per_tok", 2), norm_power=1.0)
    experts = MoeSpec(routing, config.get("intermediate_size", 14336), config.activation())
    num = llama.num_layers(config)
    layers = []
    for index, kind in enumerate(config.layer_types([KINDS[index % 2 == 0] for index in range(num)], KINDS)):
        part = attention if kind == "full_attention" else _net(config, index, num)
        multipliers = Multipliers(
            attention=config.get(f"{FACTORS[kind]}_beta_factor", 1.0),
            attention_residual=config.get(f"{FACTORS[kind]}_alpha_factor", 1.0),
            mlp=config.get("mlp_beta_factor", 1.0),
            mlp_residual=config.get("mlp_alpha_factor", 1.0),
        )
        norm = llama.rms_norm(config)
        layers.append(LayerSpec(part, experts, norm, residual_is_normed=True, multipliers=multipliers))
    widths = dict.fromkeys(("c", "b", "x"), num_heads * head_dim)
    names = NAMES | fused(NET, f"{ATTENTION}.qkv_proj", widths, num_heads)
    return llama.llama_model(config, "minimax", tuple(layers)), names


def _net(config: Config, index: int, num_layers: int) -> Mamba2Spec:
    """Later heads decay slower, and later layers, too."""
    if config.activation() != "silu":
        raise config.refuse(f"hidden_act must be silu, not {config.activation()!r}")
    num_heads, head_dim = config.heads()
    # In float32, as transformers computes them.
    rates = (1 / 2 ** (8 / num_heads)) ** (torch.arange(num_heads) + 1)
    decay = rates * (1 - index / (num_layers - 1 + 1e-5) + 1e-5)
    return Mamba2Spec(
        num_heads=num_heads,
        num_groups=num_heads,
        head_dim=head_dim,
        state_dim=head_dim,
        conv_width=0,
        norm_eps=NET_NORM_EPS,
        decay=tuple(decay.tolist()),
        norms_all=True,
        gates_normed=True,
    )


NAMES = replace(
    moe.MIXTRAL_NAMES
    | {
        f"{NET}.z": f"{ATTENTION}.output_gate",
        f"{NET}.norm": f"{ATTENTION}.norm",
        f"{NET}.output": f"{ATTENTION}.out_proj",
    },
    # Tables that follow from the configuration.
    ignored=(r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",),
)
