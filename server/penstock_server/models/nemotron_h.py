"""Nemotron-H: each layer is Mamba 2, attention without rope, an MLP with squared ReLU, or experts with it."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.experts import MoeSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.models import deepseek, llama
from penstock_server.models.config import Config
from penstock_server.models.mamba2 import ATTENTIONS, BACKBONE_NAMES, MIXER, NETS, NORM, SPELLINGS, net_names, read_net
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

PATTERN = {"M": NETS[0], "*": ATTENTIONS[0], "-": "mlp", "E": "moe"}
DRAFTER = r"mtp\..+"  # the layers that draft


def nemotron_h(config: Config) -> tuple[ModelSpec, NameMap]:
    spellings = {**SPELLINGS, "mamba_n_heads": "mamba_num_heads", "mamba_d_state": "ssm_state_size"}
    ours = config.renamed(**{**spellings, "mamba_d_head": "mamba_head_dim", "hidden_act": "mlp_hidden_act"})
    config = ours.with_defaults(num_key_value_heads=8, head_dim=128, intermediate_size=21504, hidden_act="relu2")
    config = config.with_defaults(rms_norm_eps=1e-5)
    own = {"hidden_act": config.get("mamba_hidden_act", "silu"), "mamba_proj_bias": config.get("use_bias", False)}
    as_net = config.part({**config.values, **own}).with_defaults(mamba_d_head=64, mamba_n_groups=8, mamba_d_state=128)
    net = replace(read_net(as_net), dt_limits=(config.get("time_step_min", 0.001), float("inf")))
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True)
    attention = replace(llama.llama_attention(config), rope=None)
    mlp = llama.llama_mlp(config, gated=False, bias=config.get("mlp_bias", False))
    kinds = {
        **dict.fromkeys(NETS, LayerSpec(net, None, norm)),
        **dict.fromkeys(ATTENTIONS, LayerSpec(attention, None, norm)),
        "mlp": LayerSpec(None, mlp, norm),
    }
    types = config.values.get("layers_block_type") or _types(config)
    if isinstance(types, list) and "moe" in types:
        kinds["moe"] = LayerSpec(None, _experts(config), norm)
    if not isinstance(types, list) or not types or any(kind not in kinds for kind in types):
        raise config.refuse(f"layers_block_type must name the layers, each one of {', '.join(kinds)}, not {types!r}")
    names = {f"layers.{{i}}.attention.{name}": f"{MIXER}.{name}_proj" for name in ("q", "k", "v")}
    names |= {f"layers.{{i}}.mlp.{name}": f"{MIXER}.{name}_proj" for name in ("up", "down")}
    names |= {f"layers.{{i}}.mlp.experts.{name}": f"{MIXER}.experts.{{e}}.{name}_proj" for name in ("up", "down")}
    names |= {f"layers.{{i}}.mlp.shared.{name}": f"{MIXER}.shared_experts.{name}_proj" for name in ("up", "down")}
    names |= {"layers.{i}.mlp.router": f"{MIXER}.gate"}
    names |= {"layers.{i}.mlp.router.correction": f"{MIXER}.gate.e_score_correction_bias"}
    names |= {"layers.{i}.attention.output": f"{MIXER}.o_proj", "layers.{i}.mlp_norm": NORM}
    spec = llama.llama_model(config, "nemotron_h", tuple(kinds[kind] for kind in types))
    return spec, NameMap({**BACKBONE_NAMES, **net_names(net, MIXER), **names}, (DRAFTER,), prefix="backbone.")


def _experts(config: Config) -> MoeSpec:
    if config.optional_int("moe_latent_size") is not None:
        raise config.refuse("moe_latent_size is not supported; it must be null")
    if config.get("mlp_bias", False):
        raise config.refuse("mlp_bias is not supported for experts; it must be false")
    width = config.get("moe_intermediate_size", 7688)
    return MoeSpec(
        deepseek.v3_routing(config.with_defaults(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1)),
        width,
        config.activation(),
        storage="ungated",
        shared_intermediate_size=config.get("moe_shared_expert_intermediate_size", 7688),
    )


def _types(config: Config) -> list[str]:
    """The layers of configurations before transformers 5, which have a letter for each."""
    return [PATTERN.get(letter, letter) for letter in config.get("hybrid_override_pattern", "ME*-")]
