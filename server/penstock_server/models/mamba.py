"""Mamba, Falcon Mamba, and what Jamba has in common with them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from penstock_server.layers.mamba import MambaSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.mamba2 import BACKBONE_NAMES, MAX_TOKENS, MIXER, NET
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location, fused

# Jamba's keys, and those of Mamba itself.
SPELLINGS = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_d_inner": "intermediate_size",
    "mamba_dt_rank": "time_step_rank",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
    "rms_norm_eps": "layer_norm_epsilon",
}


def mamba(config: Config) -> tuple[ModelSpec, NameMap]:
    config = _ours(config)
    return _model(config, "mamba", read_net(config))


def falcon_mamba(config: Config) -> tuple[ModelSpec, NameMap]:
    """Mamba with norms of steps, B and C that have no weights."""
    config = _ours(config)
    net = replace(read_net(config), norm_eps=config.get("mixer_rms_eps", 1e-6), norms_have_weights=False)
    return _model(config, "falcon_mamba", net)


def _ours(config: Config) -> Config:
    config = config.renamed(**SPELLINGS)
    return config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=MAX_TOKENS)


def _model(config: Config, architecture: str, net: MambaSpec) -> tuple[ModelSpec, NameMap]:
    layer = LayerSpec(net, None, llama.rms_norm(config))
    spec = llama.llama_model(config, architecture, (layer,) * llama.num_layers(config), tied=True)
    names = {**BACKBONE_NAMES, **net_names(net, MIXER)}
    # COMPAT: the embedding has its old name in some files, as in those of the package mamba_ssm.
    return spec, NameMap(names, prefix="backbone.", others={"embedding": "backbone.embedding"})


def read_net(config: Config) -> MambaSpec:
    """A layer by the keys of Jamba, without norms."""
    if config.activation() != "silu":
        raise config.refuse(f"hidden_act must be silu, not {config.activation()!r}")
    hidden_size, channels = config.require("hidden_size", int), config.optional_int("mamba_d_inner")
    is_auto = config.values.get("mamba_dt_rank") in (None, "auto")
    return MambaSpec(
        # COMPAT: the published Falcon Mamba has an expand that is not the factor of its size.
        channels=int(config.get("mamba_expand", 2.0) * hidden_size) if channels is None else channels,
        state_dim=config.get("mamba_d_state", 16),
        step_rank=ceil(hidden_size / 16) if is_auto else config.require("mamba_dt_rank", int),
        conv_width=config.get("mamba_d_conv", 4),
        has_conv_bias=config.get("mamba_conv_bias", True),
        has_bias=config.get("mamba_proj_bias", False),
    )


def net_names(net: MambaSpec, module: str) -> dict[str, str | Location]:
    own = {"conv": "conv1d", "steps": "dt_proj", "dt_bias": "dt_proj.bias", "a_log": "A_log", "skip": "D"}
    own |= {f"{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}
    return {
        **{f"{NET}.{name}": f"{module}.{theirs}" for name, theirs in own.items()},
        f"{NET}.output": f"{module}.out_proj",
        **fused(NET, f"{module}.in_proj", {"x": net.channels, "z": net.channels}),
        **fused(f"{NET}.rates", f"{module}.x_proj", {"dt": net.step_rank, "b": net.state_dim, "c": net.state_dim}),
    }
