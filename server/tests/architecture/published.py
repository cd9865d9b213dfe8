"""Layouts that transformers has no classes for: a model that computes the same, saved in the published layout. And
Mllama, whose text model transformers does not find by its type."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DeepseekV3ForCausalLM,
    FalconForCausalLM,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaForCausalLM,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """How a model is saved as a checkpoint of another model type."""

    model_type: str
    tensors: Callable[[Tensors, LlamaConfig], Tensors]
    values: dict[str, Any]  # changes of config.json; None removes a key
    reference: type[PreTrainedModel] = LlamaForCausalLM

    def save(self, model: PreTrainedModel, folder: Path) -> Path:
        folder.mkdir()
        config = {**model.config.to_dict(), **self.values, "model_type": self.model_type}
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = self.tensors(dict(model.state_dict()), model.config)
        copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, folder / "model.safetensors")
        return folder


class NoRope(torch.nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(1), x.new_zeros(1)


class AlibiLlama(LlamaForCausalLM):
    """Llama with BLOOM's ALiBi, computed from distances, instead of rope."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.rotary_emb = NoRope()

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        num_tokens = input_ids.shape[1]
        alibi = build_alibi_tensor(torch.ones(1, num_tokens), self.config.num_attention_heads, torch.float32)
        alibi = alibi - alibi.transpose(1, 2)  # [heads, queries, keys]
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        mask = alibi.masked_fill(future, torch.finfo(self.dtype).min)[None].to(self.dtype)
        return super().forward(input_ids, attention_mask=mask, **options)


INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "lm_head": "output",
}


def internlm2(tensors: Tensors, config: LlamaConfig) -> Tensors:
    """q, k and v fused per KV head: its queries, its key, its value."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for theirs, ours in INTERNLM2_NAMES.items():
            name = name.replace(theirs, ours)
        for part in ("q", "k", "v"):
            fused = name.replace(f"self_attn.{part}_proj", "attention.wqkv")
            if fused != name:
                heads = tensor.view(config.num_key_value_heads, -1, config.head_dim, *tensor.shape[1:])
                found[fused] = torch.cat((found[fused], heads), 1) if fused in found else heads
                break
        else:
            found[name] = tensor
    return {name: tensor.flatten(0, 2) if "wqkv" in name else tensor for name, tensor in found.items()}


def baichuan(tensors: Tensors, config: LlamaConfig) -> Tensors:
    """q, k and v fused; with rope tables, as early exporters saved them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        fused = name
        for part in ("q", "k", "v"):
            fused = fused.replace(f"{part}_proj", "W_pack")
        found[fused] = torch.cat((found[fused], tensor)) if fused in found else tensor
    for layer in range(config.num_hidden_layers):
        found[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    return found


def baichuan2(tensors: Tensors, config: LlamaConfig) -> Tensors:
    """With a head whose rows have different lengths, which the model ignores."""
    found = baichuan(tensors, config)
    lengths = torch.linspace(0.3, 4.0, config.vocab_size)[:, None]
    return {**found, "lm_head.weight": found["lm_head.weight"] * lengths}


class UnitHeadLlama(LlamaForCausalLM):
    """Llama with the normalized head of Baichuan 2."""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        hidden = self.model(input_ids, **options).last_hidden_state
        output = super().forward(input_ids, **options)
        output.logits = hidden @ torch.nn.functional.normalize(self.lm_head.weight).T
        return output


ROPE_OLD = {"rope_parameters": None, "rope_theta": 10000.0}
INTERNLM2 = Published("internlm2", internlm2, {**ROPE_OLD, "bias": False, "attention_bias": None, "head_dim": None})
INTERNLM2_BIAS = Published("internlm2", internlm2, {**INTERNLM2.values, "bias": True})
BAICHUAN = Published("baichuan", baichuan, {**ROPE_OLD, "head_dim": None, "num_key_value_heads": None})
BAICHUAN2 = Published("baichuan", baichuan2, {**BAICHUAN.values, "z_loss_weight": 0}, UnitHeadLlama)
BAICHUAN_13B = Published(
    "baichuan",
    baichuan,
    {**BAICHUAN.values, "rope_theta": None, "max_position_embeddings": None, "model_max_length": 256},
    AlibiLlama,
)
MLLAMA_TEXT = Published("mllama_text_model", lambda tensors, _: tensors, {}, MllamaForCausalLM)


OLMO_HYBRID_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def olmo_hybrid(tensors: Tensors, config: Any) -> Tensors:
    """With a convolution for each of queries, keys and values. transformers cuts its own into three equal parts as it
    saves a model, and renames the norms of all layers."""
    linear = [f"model.layers.{i}." for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(linear))}
    found = rename({name: tensor for name, tensor in tensors.items() if name not in rest}, OLMO_HYBRID_NORMS)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for prefix in linear:
        parts = found.pop(f"{prefix}linear_attn.conv1d.weight").split([keys, keys, values])
        found |= {f"{prefix}linear_attn.{part}_conv1d.weight": each for part, each in zip("qkv", parts, strict=True)}
    return rest | found


OLMO_HYBRID = Published(
    "olmo_hybrid", olmo_hybrid, {}, getattr(transformers, "OlmoHybridForCausalLM", LlamaForCausalLM)
)


def rename(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """Replaces these parts of names, one after the other."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


def joined(tensors: Tensors, fused: str, parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")) -> Tensors:
    """Puts the tensors of these modules, one below the other, into one of the name `fused`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        part = next((part for part in parts if f".{part}." in name), None)
        name = name if part is None else name.replace(part, fused)
        found[name] = torch.cat((found[name], tensor)) if name in found else tensor
    return found


EXAONE_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn": "attn.attention",
    "o_proj": "out_proj",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
CHATGLM_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "model.layers": "transformer.encoder.layers",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "gate_up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "lm_head": "transformer.output_layer",
}
MSFT_NAMES = {
    "model.embed_tokens": "transformer.embd.wte",
    "model.final_layernorm": "lm_head.ln",
    "lm_head.weight": "lm_head.linear.weight",
    "lm_head.bias": "lm_head.linear.bias",
    "model.layers": "transformer.h",
    "input_layernorm": "ln",
    "self_attn": "mixer",
    "mixer.dense": "mixer.out_proj",
}


def mixformer(tensors: Tensors, config: Any) -> Tensors:
    """All modules in one sequence, with rope tables as they were saved."""
    found: Tensors = {}
    last = config.num_hidden_layers + 1
    outside = {"transformer.embd": "layers.0", "lm_head.ln": f"layers.{last}.ln", "lm_head": f"layers.{last}"}
    for name, tensor in rename(joined(tensors, "Wqkv"), MSFT_NAMES).items():
        if name.startswith("transformer.h."):
            _, _, number, rest = name.split(".", 3)
            found[f"layers.{int(number) + 1}.{rest}"] = tensor
        else:
            theirs = next(part for part in outside if name.startswith(part))
            found[name.replace(theirs, outside[theirs])] = tensor
    return {**found, "layers.1.mixer.rotary_emb.inv_freq": torch.ones(4)}


class SharedGate(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((*x.shape[:-1], 1), 40.0)


class DeepseekMoe(Qwen2MoeForCausalLM):
    """Qwen2-MoE whose shared expert is not gated."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if hasattr(layer.mlp, "shared_expert_gate"):
                layer.mlp.shared_expert_gate = SharedGate()


def experts_apart(tensors: Tensors) -> Tensors:
    """A tensor for each expert, as DeepSeek publishes them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.partition(".experts.")
        for number, expert in enumerate(tensor if kind else ()):
            if kind == "gate_up_proj":
                gate, up = expert.chunk(2)
                found |= {f"{stem}.experts.{number}.gate_proj.weight": gate.clone()}
                found |= {f"{stem}.experts.{number}.up_proj.weight": up.clone()}
            else:
                found[f"{stem}.experts.{number}.down_proj.weight"] = expert.clone()
        if not kind:
            found[name] = tensor
    return found


PHI_MSFT = {
    "hidden_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 6,
    "n_head_kv": None,
    "n_inner": 80,
    "n_positions": 256,
    "rotary_dim": 8,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
RW: dict[str, Any] = {
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_kv_heads": None,
    "new_decoder_architecture": None,
    "multi_query": None,
    "rope_parameters": None,
    "n_layer": 3,
    "n_head": 6,
}
INTERNLM = Published("internlm", lambda tensors, _: tensors, {**ROPE_OLD, "attention_bias": None, "bias": True})
EXAONE = Published(
    "exaone",
    lambda tensors, _: rename(tensors, EXAONE_NAMES),
    {
        "num_hidden_layers": None,
        "hidden_act": None,
        "rms_norm_eps": None,
        "num_layers": 3,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-6,
    },
)
CHATGLM = Published(
    "chatglm",
    lambda tensors, _: rename(joined(tensors, "query_key_value"), CHATGLM_NAMES),
    {
        **PHI_MSFT,
        **dict.fromkeys(key for key in PHI_MSFT if key.startswith(("n_", "rotary", "activation", "layer_norm"))),
        "hidden_size": 48,
        "num_attention_heads": 6,
        "head_dim": None,
        "vocab_size": None,
        "rms_norm_eps": None,
        "num_layers": 3,
        "padded_vocab_size": 131,
        "ffn_hidden_size": 80,
        "kv_channels": 16,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "seq_length": 256,
        "layernorm_epsilon": 1.5625e-7,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rope_ratio": 50,
        "rmsnorm": True,
        "post_layer_norm": True,
    },
    GlmForCausalLM,
)
REFINED_WEB = Published(
    "RefinedWeb", lambda tensors, _: tensors, {**RW, "n_head_kv": 2, "parallel_attn": True}, FalconForCausalLM
)
REFINED_WEB_MODEL = Published(
    "RefinedWebModel",
    lambda tensors, _: tensors,
    {**RW, "multi_query": True, "parallel_attn": True},
    FalconForCausalLM,
)
FALCON_RW = Published(
    "RefinedWebModel",
    lambda tensors, _: tensors,
    {**RW, "n_head": 12, "parallel_attn": None, "alibi": True},
    FalconForCausalLM,
)
PHI_FIRST = Published(
    "phi-msft", lambda tensors, _: rename(joined(tensors, "Wqkv"), MSFT_NAMES), PHI_MSFT, PhiForCausalLM
)
MIXFORMER = Published(
    "mixformer-sequential", mixformer, {**PHI_MSFT, "vocab_size": 129, "pad_vocab_size_multiple": 131}, PhiForCausalLM
)
DEEPSEEK_MOE = Published(
    "deepseek",
    lambda tensors, _: rename(experts_apart(tensors), {"shared_expert.": "shared_experts."}),
    {
        "num_experts": None,
        "n_routed_experts": 6,
        "shared_expert_intermediate_size": None,
        "n_shared_experts": 2,
        "mlp_only_layers": None,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        **ROPE_OLD,
    },
    DeepseekMoe,
)
KIMI_K2 = Published("kimi_k2", lambda tensors, _: experts_apart(tensors), {}, DeepseekV3ForCausalLM)
