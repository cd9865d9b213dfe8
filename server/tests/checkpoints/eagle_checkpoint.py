"""EAGLE-3 heads in the published layout for tiny Llama-like models: random ones, and one that knows a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 48, 80, 6, 2, 8, 60
Tensors = dict[str, Tensor]


def random_head(num_tokens: int) -> Tensors:
    """For a vocabulary of which the head knows a part."""
    torch.manual_seed(1)
    sizes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
    }
    tensors = {f"{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.rand(HIDDEN) + 0.5
    tensors["norm.weight"] = torch.rand(HIDDEN) + 0.5
    of_model = torch.randperm(num_tokens)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = of_model - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.isin(torch.arange(num_tokens), of_model)
    return tensors


def save_head(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def knowing_head(model: Any, text: list[int], layers: tuple[int, ...]) -> Tensors:
    """A head whose first draft is right everywhere in a text, and whose others are wrong. layers: those that it
    reads."""
    num_tokens = model.config.vocab_size
    head = {name: torch.zeros_like(tensor) for name, tensor in random_head(num_tokens).items() if "2" not in name}
    head |= {name: torch.ones(HIDDEN) for name in head if "norm" in name}
    # A fitted `fc` maps what is read at each position to the code of the token after the next one.
    torch.manual_seed(2)
    head["lm_head.weight"] = torch.nn.functional.normalize(torch.randn(num_tokens, HIDDEN))
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in layers], 1)[:-2]
        head["fc.weight"] = (torch.linalg.pinv(read) @ head["lm_head.weight"][text[2:]]).T
    return head
