"""The tensors of a transformers model, named, split, stacked and ordered as by llama.cpp's converter."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

# What llama.cpp's converter does, listed here again so that the reader is not tested against its own tables: these
# architectures derive from its LlamaModel with permuted q and k rows, and these store norm weights plus one.
PERMUTED = (
    "arcee",
    "baichuan",
    "granite",
    "granitehybrid",
    "granitemoe",
    "internlm2",
    "llama",
    "mistral3",
    "olmo",
    "smollm3",
)
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
# Parts of gated delta networks that have rows for value heads, which go round the key heads in qwen35 files.
OF_VALUE_HEADS = ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
NOT_CONVERTED = (".attn.bias", ".masked_bias", "inv_freq", ".act_fn.alpha_p", ".act_fn.alpha_n", ".beta", ".eps")
OF_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
EXPERT_NAMES = {
    "w1": "ffn_gate_exps",
    "w2": "ffn_down_exps",
    "w3": "ffn_up_exps",
    **{f"{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
}
# Tensors that hold gate and up, one after the other.
GATE_UP = {
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
}
DBRX_EXPERTS = {"w1": "ffn_gate_exps", "v1": "ffn_up_exps", "w2": "ffn_down_exps"}


def gguf_tensors(
    model: transformers.PreTrainedModel, architecture: str, old_layout: bool = False
) -> dict[str, np.ndarray]:
    """The tensors by their GGUF names. old_layout: DeepSeek's latent expansion is one tensor instead of two."""
    config = model.config
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in _split(_split_states(_stacked(published_tensors(model)), config), config, old_layout):
        if name.endswith(NOT_CONVERTED):
            continue
        # BLOOM's converter removes the prefix first.
        names = (name, name.removeprefix("transformer."))
        gguf_name = next(filter(None, (table.get_name(each, (".weight", ".bias")) for each in names)), None) or name
        assert gguf_name.startswith(("blk.", "enc.", "dec.", "output", "token_embd", "position_embd")), name
        found[gguf_name] = _ordered(tensor, gguf_name, config, architecture)
    return {name: _squeezed(tensor.float(), name).numpy() for name, tensor in found.items()}


def published_tensors(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """The tensors as `save_pretrained` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks the matrices of all experts, and StableLM's norms of all heads."""
    stacked: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        expert = OF_ONE_EXPERT.fullmatch(name)
        if expert is not None:
            layer = re.search(r"\.(\d+)\.", name)
            assert layer is not None
            parts.setdefault(f"blk.{layer[1]}.{EXPERT_NAMES[expert[3]]}.weight", {})[int(expert[2])] = tensor
        elif ".norms." in name:
            stem, _, rest = name.partition(".norms.")
            parts.setdefault(f"{stem}.weight", {})[int(rest.split(".")[0])] = tensor
        else:
            stacked[name] = tensor
    return stacked | {name: torch.stack([of[index] for index in sorted(of)]) for name, of in parts.items()}


def _split(tensors: dict[str, Tensor], config: Any, old_layout: bool) -> Iterator[tuple[str, Tensor]]:
    """Splits the tensors that llama.cpp stores separately, under its names. Yields the others unchanged."""
    for name, tensor in tensors.items():
        layer = re.search(r"\.(\d+)\.", name)
        block = f"blk.{layer[1]}" if layer else ""
        stem = next((key for key in GATE_UP if key in name), None)
        if stem is not None:
            for half, part in zip(GATE_UP[stem], tensor.chunk(2, dim=-2), strict=True):
                yield f"{block}.{half}.weight", part
        elif "block_sparse_moe.router" in name:
            yield f"{block}.ffn_gate_inp.weight", tensor
        elif name.endswith("experts.gate_up_proj"):  # gpt-oss: transposed, gate and up interleaved
            for offset, half in enumerate(("gate", "up")):
                yield f"{block}.ffn_{half}_exps.weight", tensor.transpose(1, 2)[:, offset::2]
        elif name.endswith("experts.gate_up_proj_bias"):
            for offset, half in enumerate(("gate", "up")):
                yield f"{block}.ffn_{half}_exps.bias", tensor[:, offset::2]
        elif name.endswith("experts.down_proj"):
            yield f"{block}.ffn_down_exps.weight", tensor.transpose(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            yield f"{block}.ffn_down_exps.bias", tensor
        elif name.endswith("self_attn.sinks"):
            yield f"{block}.attn_sinks.weight", tensor
        elif ".ffn.experts.mlp." in name:
            matrix = name.split(".")[-1]
            of_each = tensor.view(config.ffn_config.moe_num_experts, -1, config.d_model)
            yield f"{block}.{DBRX_EXPERTS[matrix]}.weight", of_each.transpose(1, 2) if matrix == "w2" else of_each
        elif name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
            yield f"{block}.exp_probs_b.bias", tensor
        elif name.endswith("kv_b_proj.weight") and not old_layout:
            heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield f"{block}.attn_k_b.weight", keys.transpose(1, 2)
            yield f"{block}.attn_v_b.weight", values
        else:
            yield name, tensor


def _squeezed(tensor: Tensor, name: str) -> Tensor:
    """Without dimensions of size 1, but for vectors of Mamba 2 and what Kimi Linear has."""
    return tensor if name.endswith(("ssm_a", "ssm_d")) or "ssm_conv1d_" in name else tensor.squeeze()


def _split_states(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Splits and transforms what layers have that keep a state."""
    if hasattr(config, "linear_num_heads"):
        return _split_kimi(tensors)
    return _split_nets(tensors, config) if hasattr(config, "linear_num_key_heads") else _split_mamba(tensors, config)


def _split_kimi(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transforms what the nets of Kimi Linear have, and gives dense layers their published names."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)[None, :, None]
        name = name.replace("self_attn.dt_bias", "self_attn.dt_proj.bias")
        found[re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)] = tensor
    return found


def _split_mamba(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r".*\.layers\.(\d+)\.(mamba|mixer|shared_mlp)\.(.+)", name)
        block, part = (f"blk.{layer[1]}", layer[3]) if layer else ("", "")
        if part == "A_log":
            found[f"{block}.ssm_a"] = -(tensor.exp() if tensor.dim() == 2 else tensor.exp()[:, None])
        elif part == "D":
            found[f"{block}.ssm_d"] = tensor[:, None] if name.replace(".D", ".dt_bias") in tensors else tensor
        elif part == "dt_bias":
            found[f"{block}.ssm_dt.bias"] = tensor
        elif part == "norm.weight":
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            found[f"{block}.ssm_norm.weight"] = tensor.view(groups, -1)
        elif part == "input_linear.weight" and not config.num_local_experts:
            for half, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[f"{block}.ffn_{half}.weight"] = rows
        elif part == "output_linear.weight" and not config.num_local_experts:
            found[f"{block}.ffn_down.weight"] = tensor
        else:
            found[name] = tensor
    return found


def _split_nets(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Splits the projections of gated delta networks and of the experts beside them, and transforms what else the
    networks have."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, net, part = name.partition(".linear_attn.")
        layer = re.search(r"\.(\d+)\.", name)
        block = f"blk.{layer[1]}" if layer else ""
        if net and part == "in_proj_qkvz.weight":
            key_heads, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
            keys, values = config.linear_key_head_dim, group * config.linear_value_head_dim
            parts = tensor.unflatten(0, (key_heads, -1)).split([keys, keys, values, values], 1)
            q, k, v, z = (each.flatten(0, 1) for each in parts)
            found |= {f"{block}.attn_qkv.weight": torch.cat([q, k, v]), f"{block}.attn_gate.weight": z}
        elif net and part == "A_log":
            found[f"{block}.ssm_a"] = -tensor.exp()
        elif net and part == "dt_bias":
            found[f"{block}.ssm_dt.bias"] = tensor
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            found |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{block}.ffn_down_exps.weight"] = tensor
        else:
            found[name] = tensor
    return found


def _ordered(tensor: Tensor, name: str, config: Any, architecture: str) -> Tensor:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
    stem = name.split(".")[-2]
    if architecture in PERMUTED and stem in ("attn_q", "attn_k"):
        return interleave(tensor, head_dim)
    if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and stem != "ssm_norm":
        return tensor + 1
    if architecture in ("qwen35", "qwen35moe"):
        return _round_key_heads(tensor, name.removeprefix("blk.").split(".")[1], config)
    if architecture == "gpt2" and stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return tensor.t() if tensor.dim() == 2 else tensor
    if architecture in ("falcon", "bloom", "gptneox") and stem == "attn_qkv":
        groups = config.num_attention_heads
        if architecture == "falcon":
            groups = config.num_kv_heads if config.new_decoder_architecture else 1
        blocks = tensor.reshape(groups, -1, head_dim, *tensor.shape[1:])
        return torch.cat([part.flatten(0, 2) for part in (blocks[:, :-2], blocks[:, -2:-1], blocks[:, -1:])])
    return tensor


def _round_key_heads(tensor: Tensor, stem: str, config: Any) -> Tensor:
    """Reorders value heads from (key head, its heads) to (its heads, key head)."""
    key_heads, values = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim

    def ordered(rows: Tensor) -> Tensor:
        group = config.linear_num_value_heads // key_heads
        return rows.unflatten(0, (key_heads, group, -1)).transpose(0, 1).flatten(0, 2)

    if stem in OF_VALUE_HEADS:
        return ordered(tensor)
    if stem == "ssm_out":
        return ordered(tensor.t()).t()
    if stem in ("ssm_conv1d", "attn_qkv"):
        return torch.cat([tensor[:-values], ordered(tensor[-values:])])
    return tensor


def interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of each head from (half, pair) to (pair, half)."""
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)
