"""The scales of fp8 keys and values that a checkpoint may hold, under the names that quantizers have given them."""

from __future__ import annotations

import math
import re

import torch

from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Checkpoint

# Also scales of queries and attention weights, which are not stored and therefore not needed.
PATTERN = r".*\.(?:[qkv]|kv|prob)_scale|.*(?:\.[qkv]_proj\.|\.prob_)output_scale"


def check_scales(quantization: object) -> None:
    """quantization: the value of `quantization_config`. Raises ConfigError if the checkpoint's scales are those of keys
    and values in 4 bits, which are a sixth of what fp8 needs."""
    if not isinstance(quantization, dict):
        return
    of_bits = quantization.get("kv_cache_scheme")
    bits = of_bits.get("num_bits") if isinstance(of_bits, dict) else None
    name = str(quantization.get("kv_cache_quant_algo") or of_bits)
    if bits == 4 or name.upper().startswith("NVFP4"):
        raise ConfigError(
            "the checkpoint's scales of keys and values are made for 4 bits (NVFP4), not for fp8; remove "
            "--kv-cache-dtype, or use a checkpoint with scales for fp8 or with none"
        )


def has_scales(checkpoint: Checkpoint) -> bool:
    return any(re.fullmatch(PATTERN, name) for name in checkpoint.names())


def read_scales(checkpoint: Checkpoint, key_weight: str, value_weight: str) -> tuple[float, float]:
    """The scales of keys and values in the layer with these projections, given by their tensors; 1 where there is none.
    Raises ConfigError for a scale per head, and for one that is not positive."""
    return _read(checkpoint, "k", key_weight), _read(checkpoint, "v", value_weight)


def _read(checkpoint: Checkpoint, letter: str, weight: str) -> float:
    projection = weight.rpartition(".")[0]
    block = projection.rpartition(".")[0]
    for name in (
        f"{block}.{letter}_scale",  # compressed-tensors
        f"{block}.attn.{letter}_scale",  # vLLM
        f"{block}.{letter}_proj.{letter}_scale",  # ModelOpt
        f"{projection}.{letter}_scale",  # ModelOpt, where one matrix holds all projections
        f"{block}.{letter}_proj.output_scale",  # Quark, earlier compressed-tensors
        f"{block}.kv_scale",  # TGI's utilities, AutoFP8
        f"{block}.attn.kv_scale",
    ):
        if name in checkpoint.names():
            return _number(checkpoint, name)
    return 1.0


def _number(checkpoint: Checkpoint, name: str) -> float:
    shape = checkpoint.shape(name)
    if math.prod(shape) != 1:
        raise ConfigError(f"tensor {name} has shape {list(shape)}; fp8 keys and values need one scale per layer")
    number = torch.empty(shape, dtype=torch.float32)
    checkpoint.read(name, None, number)
    if not number.item() > 0:
        raise ConfigError(f"tensor {name}, a scale of fp8 keys or values, is {number.item()}; it must be positive")
    return number.item()
