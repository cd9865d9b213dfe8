"""Qwen3-Next and Qwen3.5: gated delta networks, and attention with gated outputs in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.gated_delta import GatedDeltaSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama, moe
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location, fused

KINDS = ("linear_attention", "full_attention")
NET = "layers.{i}.attention.net"
MODULE = "model.layers.{i}.linear_attn"
MTP = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "project": "fc", "norm": "norm"}
DRAFTER = r"mtp\..+"  # what is left of the layer that drafts


def qwen3_next(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=2, num_experts_per_tok=10, norm_topk_prob=True)
    widths = {"intermediate_size": 5632, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    config = config.with_defaults(**widths)
    net = _net(config)
    names = moe.QWEN_NAMES | _names(net)
    for projections in ("qkvz", "ba"):
        widths = {name: net.widths[name] for name in projections}
        names |= fused(NET, f"{MODULE}.in_proj_{projections}", widths, net.num_key_heads)
    layers = moe.with_shared_expert(config, _layers(config, net), 512)
    return _model(config, "qwen3_next", layers), _with_drafter(names, len(layers))


def qwen3_5_text(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=4)
    net = _net(config)
    layers = _layers(config, net)
    return _model(config, "qwen3_5_text", layers), _names_3_5(llama.NAMES, net, len(layers))


def qwen3_5_moe_text(config: Config) -> tuple[ModelSpec, NameMap]:
    """All layers have experts."""
    config = config.with_defaults(num_key_value_heads=2, num_experts_per_tok=8)
    config = config.with_defaults(moe_intermediate_size=512, shared_expert_intermediate_size=512)
    # transformers has no keys for these.
    always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 1}
    config = config.part({**config.values, **always})
    net = _net(config)
    layers = moe.with_shared_expert(config, _layers(config, net), 256)
    return _model(config, "qwen3_5_moe_text", layers), _names_3_5(moe.QWEN_NAMES, net, len(layers))


def _model(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    spec = llama.llama_model(config, architecture, layers)
    mtp = replace(layers[-1], attention=_attention(config))  # if the checkpoint has it
    return replace(spec, final_norm=_norm(config), mtp=mtp)


def _with_drafter(names: NameMap, number: int) -> NameMap:
    """With the names of the layer that drafts, which has this number behind the layers."""
    moved = names.renamed(lambda name: name.replace("model.layers.{i}", "mtp.layers.0"))

    def own(names: Mapping[str, str | Location]) -> dict[str, str | Location]:
        return {key.replace("{i}", str(number)): value for key, value in names.items() if key.startswith("layers.")}

    mtp: dict[str, str | Location] = {f"layers.{number}.mtp.{ours}": f"mtp.{theirs}" for ours, theirs in MTP.items()}
    others = {**names.others, **own(moved.others)}
    return replace(names | own(moved.names) | mtp, others=others, ignored=(DRAFTER,))


def _layers(config: Config, net: GatedDeltaSpec) -> tuple[LayerSpec, ...]:
    num, interval = llama.num_layers(config), config.get("full_attention_interval", 4)
    types = config.layer_types([KINDS[(index + 1) % interval == 0] for index in range(num)], KINDS)
    return tuple(
        LayerSpec(net if kind == KINDS[0] else _attention(config), llama.llama_mlp(config), _norm(config))
        for kind in types
    )


def _attention(config: Config) -> AttentionSpec:
    bias = config.get("attention_bias", False)
    attention = llama.llama_attention(
        config.with_defaults(head_dim=256),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNormSpec(_norm(config)),
        default_partial=0.25,
    )
    return replace(attention, has_gates=True)


def _net(config: Config) -> GatedDeltaSpec:
    if config.activation() != "silu":
        raise config.refuse(f"hidden_act must be silu, not {config.activation()!r}")
    return GatedDeltaSpec(
        num_heads=config.get("linear_num_value_heads", 32),
        num_key_heads=config.get("linear_num_key_heads", 16),
        key_dim=config.get("linear_key_head_dim", 128),
        value_dim=config.get("linear_value_head_dim", 128),
        conv_width=config.get("linear_conv_kernel_dim", 4),
        norm_eps=_norm(config).eps,
        is_tiled=config.get("linear_heads_are_tiled", False),  # in GGUF files
    )


def _norm(config: Config) -> NormSpec:
    return NormSpec("rms", config.get("rms_norm_eps", 1e-6), offset=1.0, wide=True)


def _names_3_5(names: NameMap, net: GatedDeltaSpec, num_layers: int) -> NameMap:
    mixed = {name: net.widths[name] for name in "qkv"}
    own: dict[str, str | Location] = {f"{NET}.{name}": f"{MODULE}.in_proj_{name}" for name in "zba"}
    names = names | _names(net) | {**own, **fused(NET, f"{MODULE}.in_proj_qkv", mixed)}
    return _with_drafter(names, num_layers)


def _names(net: GatedDeltaSpec) -> dict[str, str | Location]:
    """The names that all checkpoints have in common."""
    mixed = {name: net.widths[name] for name in "qkv"}
    own = {"a_log": "A_log", "dt_bias": "dt_bias", "norm": "norm", "output": "out_proj"}
    names: dict[str, str | Location] = {f"{NET}.{name}": f"{MODULE}.{theirs}" for name, theirs in own.items()}
    return names | fused(f"{NET}.conv", f"{MODULE}.conv1d", mixed)
