"""Configurations of GGUF architectures with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock_server.weights.gguf.decoder import (
    gated_delta,
    head_dim,
    kv_heads,
    layer_types,
    llama_like,
    mamba,
    mamba2,
    num_layers,
    sizes,
)
from penstock_server.weights.gguf.llama import EXAONE4_PERIOD, granite, granite_like, lfm2, llama, nemotron_h
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.rope import rope_parameters

GPT_OSS_PERIOD = 2  # every second layer has full attention
# Values of `expert_gating_func`. The first files of DeepSeek V2 lack it.
UNSPECIFIED, SOFTMAX, SIGMOID = 0, 1, 2


def _routing(metadata: Metadata, normalizes: bool = False) -> dict[str, Any]:
    """How tokens are routed to experts. normalizes: whether the routing weights sum to one, if the file lacks it."""
    return {
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": bool(metadata.model("expert_weights_norm", normalizes)),
    }


def _require_sigmoid(metadata: Metadata) -> None:
    scoring = metadata.integer("expert_gating_func", SIGMOID)
    if scoring != SIGMOID:
        raise metadata.error(f"expert_gating_func {scoring} is not supported; supported: 2 (sigmoid)")


def _expert_width(metadata: Metadata) -> int:
    """The intermediate size of one expert."""
    stored = (tensor for name, tensor in metadata.header.tensors.items() if name.endswith("ffn_up_exps.weight"))
    first = next(stored, None)
    return metadata.integer("expert_feed_forward_length", None if first is None else first.shape[1])


def _llama(metadata: Metadata) -> dict[str, Any]:
    if not metadata.integer("expert_count", 0):
        return llama(metadata)
    config = llama_like(metadata, "MixtralForCausalLM", "mixtral", sliding_window=None)
    return {**config, **_routing(metadata), "num_local_experts": metadata.integer("expert_count")}


def _dbrx(metadata: Metadata) -> dict[str, Any]:
    clip = metadata.number("attention.clamp_kqv", 0.0)
    return {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "d_model": metadata.integer("embedding_length"),
        "n_layers": metadata.integer("block_count"),
        "n_heads": metadata.integer("attention.head_count"),
        "max_seq_len": metadata.integer("context_length"),
        "rope_parameters": rope_parameters(metadata, head_dim(metadata)),
        "attn_config": {"kv_n_heads": metadata.integer("attention.head_count_kv"), "clip_qkv": clip or None},
        "ffn_config": {
            "ffn_hidden_size": metadata.integer("feed_forward_length"),
            "moe_num_experts": metadata.integer("expert_count"),
            "moe_top_k": metadata.integer("expert_used_count"),
        },
    }


def _deepseek2(metadata: Metadata) -> dict[str, Any]:
    """DeepSeek V2 and V3.

    key_length and value_length describe the expanded heads in older files. In newer files they describe the latent, and
    the keys that end in _mla describe the expanded heads.
    """
    scoring, rope_dim = metadata.integer("expert_gating_func", UNSPECIFIED), metadata.integer("rope.dimension_count")
    if scoring not in (UNSPECIFIED, SOFTMAX, SIGMOID):
        raise metadata.error(f"expert_gating_func {scoring} is not supported; supported: 1 (softmax), 2 (sigmoid)")
    is_third, groups = scoring == SIGMOID, metadata.integer("expert_group_count", 1)
    class_name, model_type = ("DeepseekV3", "deepseek_v3") if is_third else ("DeepseekV2", "deepseek_v2")
    config = llama_like(metadata, f"{class_name}ForCausalLM", model_type)
    routing = _routing(metadata)
    if routing["norm_topk_prob"] and not is_third:
        raise metadata.error("expert_weights_norm is not supported with softmax gating")
    key_length = metadata.integer("attention.key_length_mla", metadata.integer("attention.key_length"))
    return {
        **config,
        **routing,
        "num_key_value_heads": config["num_attention_heads"],
        "rope_parameters": rope_parameters(metadata, rope_dim),
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": metadata.integer("attention.value_length_mla", metadata.integer("attention.value_length")),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": _expert_width(metadata),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "num_nextn_predict_layers": 0,
    }


def _sigmoid_experts(metadata: Metadata) -> dict[str, Any]:
    """The experts of models that route as DeepSeek V3 does."""
    _require_sigmoid(metadata)
    return {
        **_routing(metadata, normalizes=True),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": _expert_width(metadata),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _glm4moe(metadata: Metadata) -> dict[str, Any]:
    return llama_like(
        metadata,
        "Glm4MoeForCausalLM",
        "glm4_moe",
        use_qk_norm=metadata.has("blk.0.attn_q_norm.weight"),
        num_nextn_predict_layers=0,
        **_sigmoid_experts(metadata),
    )


def _dots1(metadata: Metadata) -> dict[str, Any]:
    return llama_like(metadata, "Dots1ForCausalLM", "dots1", sliding_window=None, **_sigmoid_experts(metadata))


def _exaone_moe(metadata: Metadata) -> dict[str, Any]:
    config = llama_like(metadata, "ExaoneMoeForCausalLM", "exaone_moe", **_sigmoid_experts(metadata))
    return {
        **config,
        "num_shared_experts": config["n_shared_experts"],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": layer_types(metadata, EXAONE4_PERIOD),
    }


def _ernie4_5_moe(metadata: Metadata) -> dict[str, Any]:
    return llama_like(
        metadata,
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        moe_num_experts=metadata.integer("expert_count"),
        moe_k=metadata.integer("expert_used_count"),
        moe_num_shared_experts=metadata.integer("expert_shared_count", 0),
        moe_intermediate_size=_expert_width(metadata),
        moe_layer_start_index=metadata.integer("leading_dense_block_count", 0),
        moe_layer_interval=metadata.integer("interleave_moe_layer_step", 1),
    )


def _hunyuan_moe(metadata: Metadata) -> dict[str, Any]:
    return llama_like(
        metadata,
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        num_experts=metadata.integer("expert_count"),
        moe_topk=metadata.integer("expert_used_count"),
    )


def _minimax_m2(metadata: Metadata) -> dict[str, Any]:
    _require_sigmoid(metadata)
    return llama_like(
        metadata,
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        intermediate_size=_expert_width(metadata),
        num_local_experts=metadata.integer("expert_count"),
        num_experts_per_tok=metadata.integer("expert_used_count"),
    )


def _kimi_linear(metadata: Metadata) -> dict[str, Any]:
    """Layers without KV heads have gated delta networks, with as many heads as attention has."""
    config = {**_deepseek2(metadata), **_routing(metadata, normalizes=True)}
    del config["rope_parameters"], config["topk_method"]
    return {
        **config,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": metadata.integer("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in kv_heads(metadata)],
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    config = llama_like(
        metadata,
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=_expert_width(metadata),
        num_local_experts=metadata.integer("expert_count"),
        sliding_window=metadata.integer("attention.sliding_window"),
        layer_types=layer_types(metadata, GPT_OSS_PERIOD),
        **_routing(metadata),
    )
    # The published model does not round the bounds of yarn; files cannot express it.
    return {**config, "rope_parameters": {**config["rope_parameters"], "truncate": False}}


def _granitemoe(metadata: Metadata) -> dict[str, Any]:
    shared_size = metadata.integer("expert_shared_feed_forward_length", 0)
    names = ("GraniteMoeShared", "granitemoeshared") if shared_size else ("GraniteMoe", "granitemoe")
    config = granite(metadata, f"{names[0]}ForCausalLM", names[1])
    num_experts = metadata.integer("expert_count")
    return {
        **config,
        **_routing(metadata),
        "num_local_experts": num_experts,
        "shared_intermediate_size": shared_size,
    }


def _lfm2moe(metadata: Metadata) -> dict[str, Any]:
    _require_sigmoid(metadata)
    return {
        **lfm2(metadata, "Lfm2MoeForCausalLM", "lfm2_moe"),
        **_routing(metadata, normalizes=True),
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": _expert_width(metadata),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
    }


def _granitehybrid(metadata: Metadata) -> dict[str, Any]:
    """Granite 4, dense or with experts. Layers without KV heads have Mamba 2."""
    num_kv_heads, num_experts = kv_heads(metadata), metadata.integer("expert_count", 0)
    size = metadata.integer("expert_shared_feed_forward_length", 0) if num_experts else _dense_width(metadata)
    has_rope = metadata.model("rope.scaling.finetuned", True)
    return {
        **granite_like(metadata, "GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        **mamba2(metadata),
        **(_routing(metadata) if num_experts else {}),
        "num_local_experts": num_experts,
        "shared_intermediate_size": size,
        "layer_types": ["attention" if heads else "mamba" for heads in num_kv_heads],
        "position_embedding_type": "rope" if has_rope else "nope",
    }


def _jamba(metadata: Metadata) -> dict[str, Any]:
    """Jamba, dense or with experts. Layers without KV heads have Mamba."""
    num_experts, num = metadata.integer("expert_count", 0), num_layers(metadata)
    attending = [index for index, heads in enumerate(kv_heads(metadata)) if heads]
    sparse = [index for index in range(num) if metadata.has(f"blk.{index}.ffn_gate_inp.weight")]
    return {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        **sizes(metadata),
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        **mamba(metadata),
        **({"num_experts_per_tok": metadata.integer("expert_used_count")} if sparse else {}),
        "num_experts": num_experts if sparse else 1,
        **_repeated(metadata, "attn_layer", attending, num),
        **_repeated(metadata, "expert_layer", sparse, num),
    }


def _repeated(metadata: Metadata, name: str, layers: list[int], num_layers: int) -> dict[str, int]:
    """The period and the offset of these layers."""
    offset = layers[0] if layers else num_layers
    period = layers[1] - offset if len(layers) > 1 else num_layers + 1
    if offset >= period or layers != list(range(offset, num_layers, period)):
        raise metadata.error(f"{name} {layers} do not repeat from the first {num_layers} layers on")
    return {f"{name}_period": period, f"{name}_offset": offset}


def _dense_width(metadata: Metadata) -> int:
    """The intermediate size of an MLP without experts."""
    gate = metadata.header.tensors.get("blk.0.ffn_gate.weight")
    return metadata.integer("feed_forward_length") if gate is None else gate.shape[0]


def _nemotron_h_moe(metadata: Metadata) -> dict[str, Any]:
    """Layers without Mamba 2 and without attention are experts."""
    return {
        **nemotron_h(metadata, mlp="moe"),
        **_sigmoid_experts(metadata),
        **_routing(metadata),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0),
        "moe_latent_size": metadata.integer("moe_latent_size", 0) or None,
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    num_experts = metadata.integer("expert_count")
    return llama_like(metadata, "OlmoeForCausalLM", "olmoe", num_experts=num_experts, **_routing(metadata))


def _phimoe(metadata: Metadata) -> dict[str, Any]:
    return llama_like(
        metadata,
        "PhimoeForCausalLM",
        "phimoe",
        num_local_experts=metadata.integer("expert_count"),
        sliding_window=metadata.integer("attention.sliding_window", 0) or None,
        lm_head_bias=metadata.has("output.bias"),
        **_routing(metadata),
    )


def _qwen_moe(metadata: Metadata, class_name: str, model_type: str, normalizes: bool, **more: Any) -> dict[str, Any]:
    return llama_like(
        metadata,
        class_name,
        model_type,
        num_experts=metadata.integer("expert_count"),
        moe_intermediate_size=_expert_width(metadata),
        **_routing(metadata, normalizes),
        **more,
    )


def _qwen2moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length", metadata.integer("feed_forward_length"))
    names = ("Qwen2MoeForCausalLM", "qwen2_moe")
    return _qwen_moe(metadata, *names, normalizes=False, shared_expert_intermediate_size=shared)


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    return _qwen_moe(metadata, "Qwen3MoeForCausalLM", "qwen3_moe", normalizes=True)


def _qwen3next(
    metadata: Metadata, class_name: str = "Qwen3NextForCausalLM", model_type: str = "qwen3_next"
) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length")
    more = {"shared_expert_intermediate_size": shared, **gated_delta(metadata)}
    return _qwen_moe(metadata, class_name, model_type, normalizes=True, **more)


def _qwen35moe(metadata: Metadata) -> dict[str, Any]:
    config = _qwen3next(metadata, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
    return {**config, "linear_heads_are_tiled": True}


BUILDERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "dbrx": _dbrx,
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone-moe": _exaone_moe,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granitehybrid,
    "granitemoe": _granitemoe,
    "hunyuan-moe": _hunyuan_moe,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2moe": _lfm2moe,
    "llama": _llama,  # Mixtral, where there are experts
    "minimax-m2": _minimax_m2,
    "nemotron_h_moe": _nemotron_h_moe,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2moe": _qwen2moe,
    "qwen35moe": _qwen35moe,
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen3next,
}
