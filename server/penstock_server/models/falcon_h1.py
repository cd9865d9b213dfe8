"""Falcon-H1: attention and Mamba 2 side by side in each layer, and a multiplier for almost everything."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.mamba2 import net_names, read_net
from penstock_server.models.spec import LayerSpec, ModelSpec, Multipliers, NameMap

LAYER = "model.layers.{i}"


def falcon_h1(config: Config) -> tuple[ModelSpec, NameMap]:
    """Multipliers of inputs become multipliers of results, except for the MLP's gate: its input is multiplied, and so
    is up(x), which is taken back behind the MLP."""
    config = config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, mamba_d_ssm=1024)
    gate_factor, down_factor = config.numbers("mlp_multipliers", (1.0, 1.0))
    z, x, b, c, dt = config.numbers("ssm_multipliers", (1.0,) * 5)
    of_net, of_attention = config.get("ssm_in_multiplier", 1.0), config.get("attention_in_multiplier", 1.0)
    for factor, name, key in (
        (gate_factor, "mlp_multipliers", "mlp_bias"),
        (of_attention, "attention_in_multiplier", "attention_bias"),
        (of_net, "ssm_in_multiplier", "mamba_proj_bias"),
    ):
        if factor != 1.0 and config.get(key, False):
            raise config.refuse(f"{name} {factor} with {key} is not supported")
    if gate_factor == 0.0:
        raise config.refuse("mlp_multipliers must not be 0")
    has_norm = config.get("mamba_rms_norm", False)
    if has_norm and config.get("mamba_norm_before_gate", True):
        raise config.refuse("mamba_norm_before_gate must be false: a norm before the gate is not supported")

    net = read_net(_with_head_dim(config))
    net = replace(
        net,
        norm_eps=net.norm_eps if has_norm else None,
        output_bias=config.get("projectors_bias", False),
        gate_factor=of_net * z,
        conv_factors=(of_net * x, of_net * b, of_net * c),
        dt_factor=of_net * dt,
    )
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    scale = attention.scale * of_attention**2 * config.get("key_multiplier", 1.0)
    multipliers = Multipliers(
        attention=of_attention * config.get("attention_out_multiplier", 1.0),
        beside=config.get("ssm_out_multiplier", 1.0),
        mlp=down_factor / gate_factor,
        mlp_input=gate_factor,
    )
    layer = LayerSpec(
        replace(attention, scale=scale),
        llama.llama_mlp(config, bias=mlp_bias),
        llama.rms_norm(config),
        multipliers=multipliers,
        beside=net,
    )
    spec = llama.llama_model(config, "falcon_h1", (layer,) * llama.num_layers(config))
    embedding = replace(spec.embedding, multiplier=config.get("embedding_multiplier", 1.0))
    head = replace(spec.head, multiplier=config.get("lm_head_multiplier", 1.0))
    names = llama.NAMES | {
        **net_names(net, f"{LAYER}.mamba", "layers.{i}.beside.net"),
        "layers.{i}.mlp_norm": f"{LAYER}.pre_ff_layernorm",
        **{f"layers.{{i}}.mlp.{name}": f"{LAYER}.feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        "norm": "model.final_layernorm",
    }
    return replace(spec, embedding=embedding, head=head), names


def _with_head_dim(config: Config) -> Config:
    """With the size of a head of Mamba 2, which its width says if the configuration does not."""
    width = config.optional_int("mamba_d_ssm")
    if width is None or config.values.get("mamba_d_head", "auto") not in (None, "auto"):
        return config
    return config.part({**config.values, "mamba_d_head": width // max(1, config.get("mamba_n_heads", 128))})
