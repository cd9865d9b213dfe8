"""Mamba 2, and what the architectures whose layers include it have in common."""

from __future__ import annotations

from penstock_server.layers.mamba2 import Mamba2Spec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location, fused

NET = "layers.{i}.attention.net"
# Kinds of layers as transformers 5 and earlier versions name them.
NETS = ("linear_attention", "mamba")
ATTENTIONS = ("full_attention", "attention")
MIXER = "backbone.layers.{i}.mixer"
NORM = "backbone.layers.{i}.norm"
# Our keys, and those of Mamba 2 itself.
SPELLINGS = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
    "mamba_expand": "expand",
    "rms_norm_eps": "layer_norm_epsilon",
}
MAX_TOKENS = 1 << 20  # longest sequence of a model in which nothing limits it


def mamba2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.renamed(**SPELLINGS).with_defaults(
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_n_groups=8,
        mamba_d_state=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_TOKENS,
    )
    net = read_net(config)
    layer = LayerSpec(net, None, llama.rms_norm(config))
    names = NameMap({**net_names(net, MIXER), **BACKBONE_NAMES}, prefix="backbone.")
    return llama.llama_model(config, "mamba2", (layer,) * llama.num_layers(config)), names


BACKBONE_NAMES: dict[str, str | Location] = {
    "embedding": "backbone.embeddings",
    "layers.{i}.attention_norm": NORM,
    "norm": "backbone.norm_f",
    "head": "lm_head",
}


def read_net(config: Config) -> Mamba2Spec:
    """A layer by the keys of Bamba."""
    if config.activation() != "silu":
        raise config.refuse(f"hidden_act must be silu, not {config.activation()!r}")
    num_heads = config.get("mamba_n_heads", 128)
    head_dim = config.values.get("mamba_d_head") or "auto"
    if head_dim == "auto":
        width = int(config.get("mamba_expand", 2.0) * config.require("hidden_size", int))
        head_dim = width // max(1, num_heads)
    bias = config.get("mamba_proj_bias", False)
    lowest, highest = config.numbers("time_step_limit", (0.0, float("inf")))
    return Mamba2Spec(
        num_heads=num_heads,
        num_groups=config.get("mamba_n_groups", 1),
        head_dim=config.part({"mamba_d_head": head_dim}).require("mamba_d_head", int),
        state_dim=config.get("mamba_d_state", 256),
        conv_width=config.get("mamba_d_conv", 4),
        norm_eps=llama.rms_norm(config).eps,
        dt_limits=(lowest, highest),
        has_conv_bias=config.get("mamba_conv_bias", True),
        has_bias=bias,
        output_bias=bias,
    )


def net_names(net: Mamba2Spec, module: str, prefix: str = NET) -> dict[str, str | Location]:
    own = {"a_log": "A_log", "dt_bias": "dt_bias", "skip": "D", "norm": "norm", "output": "out_proj"}
    names: dict[str, str | Location] = {f"{prefix}.{name}": f"{module}.{theirs}" for name, theirs in own.items()}
    projected = {name: net.widths[name] for name in ("z", "x", "b", "c", "dt")}
    convolved = {name: net.widths[name] for name in ("x", "b", "c")}
    return {
        **names,
        **fused(prefix, f"{module}.in_proj", projected),
        **fused(f"{prefix}.conv", f"{module}.conv1d", convolved),
    }
