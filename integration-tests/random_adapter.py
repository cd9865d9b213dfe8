"""LoRA adapters with random weights for the embedded model, and requests for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from test_worker_death import TOKENS

LAYERS, HIDDEN, KV, INNER = 30, 576, 192, 1536  # sizes of the embedded model
SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def make_adapter(folder: Path, seed: int, rank: int = 8, hidden: int = HIDDEN) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (out_features, in_features) in SIZES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            in_features += hidden - HIDDEN
            shapes = {"lora_A": (rank, in_features), "lora_B": (out_features, rank)}
            for matrix, shape in shapes.items():
                tensors[f"{name}.{matrix}.weight"] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [module.rpartition(".")[2] for module in SIZES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def request(prompt: str, adapter: str | None) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS, "adapter_id": adapter}}
