"""Layouts that transformers has no classes for: a Llama that computes the same, saved in the published layout. And
Mllama, whose text model transformers does not find by its type."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MllamaForCausalLM, PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """How a model is saved as a checkpoint of another model type."""

    model_type: str
    tensors: Callable[[Tensors, LlamaConfig], Tensors]
    values: dict[str, Any]  # of config.json; None removes a key
    reference: type[PreTrainedModel] = LlamaForCausalLM

    def save(self, model: PreTrainedModel, folder: Path) -> Path:
        folder.mkdir()
        config = {**model.config.to_dict(), **self.values, "model_type": self.model_type}
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = self.tensors(dict(model.state_dict()), model.config)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
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
