"""EXAONE 3: Llama with its own names. EXAONE 4: norms after attention and MLP, and per head; in models with sliding
windows, the layers with full attention have no rope. EXAONE with experts: the same attention, norms before its parts,
and the experts of DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import deepseek, llama, moe
from penstock_server.models.config import Config
from penstock_server.models.olmo import POST_NAMES
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement

LAYER = "transformer.h.{i}"
NAMES = NameMap(
    names={
        "embedding": "transformer.wte",
        "layers.{i}.attention_norm": f"{LAYER}.ln_1",
        "layers.{i}.attention.q": f"{LAYER}.attn.attention.q_proj",
        "layers.{i}.attention.k": f"{LAYER}.attn.attention.k_proj",
        "layers.{i}.attention.v": f"{LAYER}.attn.attention.v_proj",
        "layers.{i}.attention.output": f"{LAYER}.attn.attention.out_proj",
        "layers.{i}.mlp_norm": f"{LAYER}.ln_2",
        "layers.{i}.mlp.gate": f"{LAYER}.mlp.c_fc_0",
        "layers.{i}.mlp.up": f"{LAYER}.mlp.c_fc_1",
        "layers.{i}.mlp.down": f"{LAYER}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    prefix="transformer.",
)
MOE_NAMES = replace(
    deepseek.EXPERT_NAMES | {"layers.{i}.mlp.router.correction": f"{moe.MLP}.e_score_correction_bias"},
    ignored=(r"mtp\..*",),
)


def exaone(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.renamed(
        num_hidden_layers="num_layers", hidden_act="activation_function", rms_norm_eps="layer_norm_epsilon"
    )
    config = config.with_defaults(rms_norm_eps=1e-5, intermediate_size=4 * config.require("hidden_size", int))
    layers = (llama.llama_layer(config),) * llama.num_layers(config)
    return llama.llama_model(config, "exaone", layers, tied=True), NAMES


def exaone4(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    norm, mlp = llama.rms_norm(config), llama.llama_mlp(config)
    layers = tuple(LayerSpec(each, mlp, norm, placement=NormPlacement.POST) for each in _attentions(config))
    return llama.llama_model(config, "exaone4", layers), POST_NAMES


def exaone_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.renamed(n_routed_experts="num_experts").with_defaults(
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        num_experts_per_tok=8,
        routed_scaling_factor=2.5,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    norm = llama.rms_norm(config)
    sparse = deepseek.experts(config, deepseek.v3_routing(config), config.get("num_shared_experts", 1))
    mlps = deepseek.mlps(config, sparse)
    layers = tuple(LayerSpec(each, mlp, norm) for each, mlp in zip(_attentions(config), mlps, strict=True))
    return llama.llama_model(config, "exaone_moe", layers), MOE_NAMES


def _attentions(config: Config) -> list[AttentionSpec]:
    """Each layer's attention."""
    full = llama.llama_attention(config, qk_norm=QkNormSpec(llama.rms_norm(config)))
    kinds = {"full_attention": full}
    default = ["full_attention"] * llama.num_layers(config)
    if config.values["sliding_window"] is not None:
        sliding = replace(full, mask=AttentionMask(config.window()))
        kinds = {"full_attention": replace(full, rope=None), "sliding_attention": sliding}
        pattern = config.values.get("sliding_window_pattern", 4)
        # A pattern of letters comes with layer_types.
        if isinstance(pattern, int):
            default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(len(default))]
    types = config.layer_types(default)
    if any(kind not in kinds for kind in types):
        raise config.refuse("layer_types contain sliding_attention, but sliding_window is null")
    return [kinds[kind] for kind in types]
