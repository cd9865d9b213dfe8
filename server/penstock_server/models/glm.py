"""ChatGLM and GLM 4: Llama with interleaved rope in half of each head; `glm4` has norms before and after each part.

GLM 4.5 to 4.7: Llama with DeepSeek V3's experts, and rope in half of each head, which is not interleaved."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import deepseek, llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"
CHAT_LAYER = "transformer.encoder.layers.{i}"


def glm(config: Config) -> tuple[ModelSpec, NameMap]:
    spec, mlp = _glm(config, "glm", NormPlacement.PRE)
    return spec, _names(mlp)


def glm4(config: Config) -> tuple[ModelSpec, NameMap]:
    spec, mlp = _glm(config, "glm4", NormPlacement.BOTH)
    names = _names(mlp)
    around = {
        "layers.{i}.attention_post_norm": f"{LAYER}.post_self_attn_layernorm",
        "layers.{i}.mlp_post_norm": f"{LAYER}.post_mlp_layernorm",
    }
    return spec, names | around


def chatglm(config: Config) -> tuple[ModelSpec, NameMap]:
    """ChatGLM 2 and 3, and GLM 4 as it was first published: fused q, k and v."""
    if config.values.get("position_encoding_2d") is not None or config.values.get("vision_config"):
        raise config.refuse(
            "the first ChatGLM, and those that read images, are not supported; ChatGLM 2, 3 and GLM 4 are"
        )
    required = {"rmsnorm": True, "apply_residual_connection_post_layernorm": False, "post_layer_norm": True}
    for key, value in required.items():
        if config.get(key, value) is not value:
            raise config.refuse(f"{key} must be {str(value).lower()}")
    if config.get("quantization_bit", 0):
        raise config.refuse(
            "quantization_bit must be 0; use an unquantized checkpoint, or one that is quantized as GPTQ"
        )
    num_heads = config.require("num_attention_heads", int)
    config = config.renamed(
        num_hidden_layers="num_layers",
        vocab_size="padded_vocab_size",
        intermediate_size="ffn_hidden_size",
        max_position_embeddings="seq_length",
        rms_norm_eps="layernorm_epsilon",
        head_dim="kv_channels",
        **({"num_key_value_heads": "multi_query_group_num"} if config.get("multi_query_attention", False) else {}),
    ).with_defaults(num_key_value_heads=num_heads, partial_rotary_factor=0.5, rms_norm_eps=1e-5)
    bias = config.get("add_bias_linear", False)
    attention = llama.llama_attention(
        config.with_defaults(rope_theta=10000.0 * config.get("rope_ratio", 1.0)),
        qkv_bias=bias or config.get("add_qkv_bias", False),
        output_bias=bias,
        interleaved=True,
    )
    mlp = llama.llama_mlp(config, bias=bias)
    layer = LayerSpec(attention, mlp, llama.rms_norm(config))
    names = NameMap(
        names={
            "embedding": "transformer.embedding.word_embeddings",
            "layers.{i}.attention_norm": f"{CHAT_LAYER}.input_layernorm",
            **fused("layers.{i}.attention", f"{CHAT_LAYER}.self_attention.query_key_value", attention.widths),
            "layers.{i}.attention.output": f"{CHAT_LAYER}.self_attention.dense",
            "layers.{i}.mlp_norm": f"{CHAT_LAYER}.post_attention_layernorm",
            **fused("layers.{i}.mlp", f"{CHAT_LAYER}.mlp.dense_h_to_4h", mlp.widths),
            "layers.{i}.mlp.down": f"{CHAT_LAYER}.mlp.dense_4h_to_h",
            "norm": "transformer.encoder.final_layernorm",
            "head": "transformer.output_layer",
        },
        prefix="transformer.",
    )
    return llama.llama_model(config, "chatglm", (layer,) * llama.num_layers(config)), names


def glm4_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=1,
    )
    norm = llama.rms_norm(config)
    attention = llama.llama_attention(
        config,
        qkv_bias=config.get("attention_bias", False),
        qk_norm=QkNormSpec(norm) if config.get("use_qk_norm", False) else None,
        default_partial=0.5,
    )
    sparse = deepseek.experts(config, deepseek.v3_routing(config), config.get("n_shared_experts", 0))
    layer = LayerSpec(attention, sparse, norm)
    layers = tuple(replace(layer, mlp=mlp) for mlp in deepseek.mlps(config, sparse))
    spec = llama.llama_model(config, "glm4_moe", layers)
    return deepseek.with_mtp(config, spec, deepseek.EXPERT_NAMES | deepseek.MTP_NAMES, layer)


def glm4_moe_lite(config: Config) -> tuple[ModelSpec, NameMap]:
    """GLM 4.7 Flash: latent attention, as DeepSeek V3 in other sizes."""
    sizes = {
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    }
    experts = {"n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4}
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
    config = config.with_defaults(rms_norm_eps=1e-5, **sizes, **experts, **groups)
    return deepseek.latent_model(config, "glm4_moe_lite", deepseek.v3_routing(config))


def _glm(config: Config, architecture: str, placement: NormPlacement) -> tuple[ModelSpec, MlpSpec]:
    config = config.with_defaults(
        head_dim=128, num_key_value_heads=2, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7
    )
    attention = llama.llama_attention(config, qkv_bias=config.get("attention_bias", True), interleaved=True)
    mlp = llama.llama_mlp(config)
    layer = LayerSpec(attention, mlp, llama.rms_norm(config), placement=placement)
    return llama.llama_model(config, architecture, (layer,) * llama.num_layers(config)), mlp


def _names(mlp: MlpSpec) -> NameMap:
    gate_up = fused("layers.{i}.mlp", f"{LAYER}.mlp.gate_up_proj", mlp.widths)
    return llama.NAMES | gate_up
