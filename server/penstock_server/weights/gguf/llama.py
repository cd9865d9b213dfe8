"""Configurations of GGUF architectures with RMS norms: Llama and its variants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock_server.weights.gguf.decoder import (
    gated_delta,
    head_dim,
    kv_heads,
    layer_types,
    llama_like,
    mamba,
    mamba2,
    mlp_widths,
    num_layers,
)
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.rope import rope_parameters

# Files lack the scale of Gemma's queries. The largest model of each generation uses hidden_size / num_heads, the others
# use head_dim. It is recognised by its number of layers.
GEMMA_LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}
GEMMA3_PERIOD = 6  # the last layer of every 6 has full attention
GEMMA3_LOCAL_THETA = 10000.0
EXAONE4_PERIOD = OLMO3_PERIOD = 4
EXAONE4_LARGEST_LAYERS, EXAONE4_WINDOW = 64, 4096  # the 32B has sliding windows, which its first files lack
BAICHUAN_ALIBI_LAYERS = 40  # the number of layers of the 13B, which has ALiBi instead of rope
XIELU_BETA = 0.5


def llama(metadata: Metadata) -> dict[str, Any]:
    """Llama, Mistral and compatible models."""
    return llama_like(metadata, "LlamaForCausalLM", "llama", mlp_bias=metadata.has("blk.0.ffn_gate.bias"))


def _apertus(metadata: Metadata) -> dict[str, Any]:
    if any(abs(beta - XIELU_BETA) > 1e-3 for beta in metadata.get("xielu.beta", [])):
        raise metadata.error(f"xielu.beta must be {XIELU_BETA} in all layers")
    return llama_like(metadata, "ApertusForCausalLM", "apertus", hidden_act="xielu")


def _arcee(metadata: Metadata) -> dict[str, Any]:
    bias = metadata.has("blk.0.ffn_up.bias")
    return llama_like(metadata, "ArceeForCausalLM", "arcee", hidden_act="relu2", mlp_bias=bias)


def _baichuan(metadata: Metadata) -> dict[str, Any]:
    config = llama_like(metadata, "BaichuanForCausalLM", "baichuan")
    if config["num_hidden_layers"] == BAICHUAN_ALIBI_LAYERS:
        config["model_max_length"] = config.pop("max_position_embeddings")
    return config


def _ernie4_5(metadata: Metadata) -> dict[str, Any]:
    config = llama_like(metadata, "Ernie4_5ForCausalLM", "ernie4_5")
    return {**config, "use_bias": config["attention_bias"]}


def _exaone4(metadata: Metadata) -> dict[str, Any]:
    config = llama_like(metadata, "Exaone4ForCausalLM", "exaone4")
    default = EXAONE4_WINDOW if config["num_hidden_layers"] == EXAONE4_LARGEST_LAYERS else 0
    window = metadata.integer("attention.sliding_window", default)
    types = layer_types(metadata, EXAONE4_PERIOD) if window else ["full_attention"] * config["num_hidden_layers"]
    return {**config, "sliding_window": window or None, "layer_types": types}


def _falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """The weights in the file are multiplied by the model's multipliers."""
    config = llama_like(metadata, "FalconH1ForCausalLM", "falcon_h1", **mamba2(metadata))
    own = {"mamba_d_ssm": metadata.integer("ssm.inner_size"), "mamba_norm_before_gate": False}
    return {**config, **own, "mamba_rms_norm": metadata.has("blk.0.ssm_norm.weight")}


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return llama_like(metadata, "GemmaForCausalLM", "gemma", hidden_act="gelu_pytorch_tanh")


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Mistral Small 3 and Ministral 3, whose queries grow with their positions."""
    strength = metadata.number("attention.temperature_scale", 0.0)
    if not strength:
        return llama_like(metadata, "MistralForCausalLM", "mistral", sliding_window=None)
    config = llama_like(metadata, "Ministral3ForCausalLM", "ministral3", sliding_window=None)
    return {**config, "rope_parameters": {**config["rope_parameters"], "llama_4_scaling_beta": strength}}


def _newer_gemma(metadata: Metadata, class_name: str, model_type: str) -> dict[str, Any]:
    config = llama_like(metadata, class_name, model_type)
    is_largest = config["num_hidden_layers"] == GEMMA_LARGEST_LAYERS[metadata.architecture]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_largest else config["head_dim"],
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_newer_gemma(metadata, "Gemma2ForCausalLM", "gemma2"),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    config = _newer_gemma(metadata, "Gemma3ForCausalLM", "gemma3_text")
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)}
    return {
        **config,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": layer_types(metadata, GEMMA3_PERIOD),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def granite(metadata: Metadata, class_name: str = "GraniteForCausalLM", model_type: str = "granite") -> dict[str, Any]:
    """Granite 3, dense or with experts."""
    if not metadata.model("rope.scaling.finetuned", True):
        raise metadata.error(f"{metadata.architecture} without rope is not supported")
    return granite_like(metadata, class_name, model_type)


def granite_like(metadata: Metadata, class_name: str, model_type: str) -> dict[str, Any]:
    config = llama_like(metadata, class_name, model_type, mlp_bias=metadata.has("blk.0.ffn_gate.bias"))
    # Files store 0 for a scale that the model does not have.
    return {
        **config,
        "attention_multiplier": metadata.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale"),
    }


def _internlm2(metadata: Metadata) -> dict[str, Any]:
    return llama_like(metadata, "InternLM2ForCausalLM", "internlm2", bias=metadata.has("blk.0.attn_q.bias"))


def lfm2(metadata: Metadata, class_name: str = "Lfm2ForCausalLM", model_type: str = "lfm2") -> dict[str, Any]:
    """LFM2, dense or with experts. Layers without KV heads have short convolutions."""
    if metadata.integer("attention.sliding_window", 0) or not metadata.model("attention.causal", True):
        raise metadata.error(f"{metadata.architecture} with a sliding window, or as an encoder, is not supported")
    num_kv_heads = kv_heads(metadata)
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_key_value_heads": max(num_kv_heads, default=0) or 1,
        "head_dim": head_dim(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(metadata, head_dim(metadata)),
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in num_kv_heads],
    }


def _mamba(metadata: Metadata) -> dict[str, Any]:
    """Mamba, or Falcon Mamba, which norms the rates of its layers. Files lack the epsilon of these norms."""
    is_falcon = bool(metadata.model("ssm.dt_b_c_rms", False))
    return {
        "architectures": ["FalconMambaForCausalLM" if is_falcon else "MambaForCausalLM"],
        "model_type": "falcon_mamba" if is_falcon else "mamba",
        **_without_attention(metadata),
        **mamba(metadata),
    }


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **_without_attention(metadata),
        **mamba2(metadata),
    }


def _without_attention(metadata: Metadata) -> dict[str, Any]:
    """What models have in common whose layers all keep a state."""
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": num_layers(metadata),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
    }


def nemotron_h(metadata: Metadata, mlp: str = "mlp") -> dict[str, Any]:
    """A layer attends if it has KV heads, is an MLP of the type `mlp` if it has a width, and else has Mamba 2."""
    of_attention, of_mlp = kv_heads(metadata), mlp_widths(metadata)
    types = [
        "attention" if heads else mlp if width else "mamba" for heads, width in zip(of_attention, of_mlp, strict=True)
    ]
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": max(of_mlp, default=0) or 1,
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_key_value_heads": max(of_attention, default=0) or 1,
        "head_dim": head_dim(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "layers_block_type": types,
        **mamba2(metadata),
    }


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    if not window:
        return llama_like(metadata, "Olmo2ForCausalLM", "olmo2")
    config = llama_like(metadata, "Olmo3ForCausalLM", "olmo3")
    # Only layers with full attention scale their rope.
    ropes = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]},
    }
    types = layer_types(metadata, OLMO3_PERIOD)
    return {**config, "rope_parameters": ropes, "sliding_window": window, "layer_types": types}


def _phi3(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    return llama_like(metadata, "Phi3ForCausalLM", "phi3", sliding_window=window or None)


def _qwen35(metadata: Metadata) -> dict[str, Any]:
    config = llama_like(metadata, "Qwen3_5ForCausalLM", "qwen3_5_text", **gated_delta(metadata))
    return {**config, "linear_heads_are_tiled": True}


def _seed_oss(metadata: Metadata) -> dict[str, Any]:
    bias = metadata.has("blk.0.attn_output.bias")
    return llama_like(metadata, "SeedOssForCausalLM", "seed_oss", attention_out_bias=bias)


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    return llama_like(metadata, "SmolLM3ForCausalLM", "smollm3", no_rope_layer_interval=4)


# Architectures without settings of their own: class name and model type.
PLAIN = {
    "chatglm": ("GlmForCausalLM", "glm"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
BUILDERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    **{name: partial(llama_like, class_name=class_, model_type=type_) for name, (class_, type_) in PLAIN.items()},
    "apertus": _apertus,
    "arcee": _arcee,
    "baichuan": _baichuan,
    "ernie4_5": _ernie4_5,
    "exaone": llama,  # EXAONE 3, a Llama with other names
    "exaone4": _exaone4,
    "falcon-h1": _falcon_h1,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": granite,
    "internlm2": _internlm2,
    "lfm2": lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "mistral3": _mistral3,
    "nemotron_h": nemotron_h,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen35": _qwen35,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
