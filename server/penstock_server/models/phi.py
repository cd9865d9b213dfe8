"""Phi 1, 1.5 and 2 (attention and MLP in parallel after one norm, biases), Phi 3 and 4 (Llama, fused projections)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"
PHI_NAMES = llama.NAMES | {
    "layers.{i}.attention.q_norm": f"{LAYER}.self_attn.q_layernorm",
    "layers.{i}.attention.k_norm": f"{LAYER}.self_attn.k_layernorm",
    "layers.{i}.attention.output": f"{LAYER}.self_attn.dense",
    "layers.{i}.mlp.up": f"{LAYER}.mlp.fc1",
    "layers.{i}.mlp.down": f"{LAYER}.mlp.fc2",
    "norm": "model.final_layernorm",
}


def phi(config: Config) -> tuple[ModelSpec, NameMap]:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = QkNormSpec(norm) if config.get("qk_layernorm", False) else None
    attention = llama.llama_attention(config, qkv_bias=True, output_bias=True, qk_norm=qk_norm, default_partial=0.5)
    activation = config.activation("hidden_act", "gelu_new")
    mlp = MlpSpec(config.require("intermediate_size", int), activation, gated=False, bias=True, down_bias=True)
    layer = LayerSpec(attention, mlp, norm, parallel=True, shares_norm=True)
    spec = llama.llama_model(config, "phi", (layer,) * llama.num_layers(config))
    return replace(spec, head=replace(spec.head, bias=True)), PHI_NAMES


def phi_msft(config: Config) -> tuple[ModelSpec, NameMap]:
    """Phi 1.5 and 2 as they were first published: q, k and v fused, and final norm and head one module, or all modules
    numbered in one sequence."""
    config = config.renamed(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        num_key_value_heads="n_head_kv",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        hidden_act="activation_function",
        layer_norm_eps="layer_norm_epsilon",
    )
    hidden_size, num_layers = config.require("hidden_size", int), llama.num_layers(config)
    _, head_dim = config.heads()
    multiple, vocab_size = config.get("pad_vocab_size_multiple", 1), config.require("vocab_size", int)
    # Half an element more, because the part of a head is rounded down.
    partial = min(1.0, (config.get("rotary_dim", 32) + 0.5) / head_dim)
    config = config.with_defaults(intermediate_size=4 * hidden_size, partial_rotary_factor=partial)
    config = Config({**config.values, "vocab_size": -(-vocab_size // multiple) * multiple}, config.path)
    spec, _ = phi(config)
    widths = spec.layers[0].plain_attention.widths if spec.layers else {}
    head = {"embedding": "transformer.embd.wte", "norm": "lm_head.ln", "head": "lm_head.linear"}
    published = _msft_names("transformer.h", widths, head)
    last = num_layers + 1
    head = {"embedding": "layers.0.wte", "norm": f"layers.{last}.ln", "head": f"layers.{last}.linear"}
    sequence = replace(_msft_names("layers", widths, head), layers=tuple(range(1, last)))
    return replace(spec, architecture="phi-msft"), replace(published, alternatives=(sequence,))


def _msft_names(prefix: str, widths: Mapping[str, int], others: dict[str, str]) -> NameMap:
    """others: the names of what is outside of layers."""
    layer = f"{prefix}.{{i}}"
    return NameMap(
        names={
            **others,
            "layers.{i}.attention_norm": f"{layer}.ln",
            **fused("layers.{i}.attention", f"{layer}.mixer.Wqkv", widths),
            "layers.{i}.attention.output": f"{layer}.mixer.out_proj",
            "layers.{i}.mlp.up": f"{layer}.mlp.fc1",
            "layers.{i}.mlp.down": f"{layer}.mlp.fc2",
        },
        ignored=(rf"{re.escape(prefix)}\.\d+\.mixer\.(rotary_emb\.scale|causal_mask)",),
        prefix=f"{prefix}.",
    )


def phi3(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rms_norm_eps=1e-5)
    layer = llama.llama_layer(config, mask=AttentionMask(window=config.window()))
    names = llama.NAMES | {
        **fused("layers.{i}.attention", f"{LAYER}.self_attn.qkv_proj", layer.plain_attention.widths),
        **fused("layers.{i}.mlp", f"{LAYER}.mlp.gate_up_proj", layer.plain_mlp.widths),
    }
    return llama.llama_model(config, "phi3", (layer,) * llama.num_layers(config)), names
